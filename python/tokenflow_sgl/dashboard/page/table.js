/* The streams as a table of which only the rows in view exist.
 *
 * Owns the table's body. Invariant: the number of elements depends on the height of the box, not on the streams.
 */

const ROW_PX = 26; // as dash.css has it
const SPARE = 4;
const BAR_S = 30; // of slack fill the bar
const COLUMNS = ["id", "phase", "slack", "num", "num wide", "num wide", "num wide", "num parks"];

const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
// A narrow window has room for five digits.
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = (value) => (value >= 1e5 ? compact.format(value) : fixed(value, 0));

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
function setData(node, name, value) {
  if (node.dataset[name] !== value) node.dataset[name] = value;
}

export class Table {
  constructor(table, scroll) {
    this.scroll = scroll;
    this.body = table.tBodies[0];
    this.table = table;
    [this.above, this.below] = [spacer(), spacer()];
    this.body.append(this.above, this.below);
    this.slots = new Map(); // key of a stream -> its row
    this.rows = [];
    scroll.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
  }
  show(rows, ownId) {
    this.rows = rows;
    this.ownId = ownId;
    this.draw();
  }
  draw() {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW_PX) - SPARE);
    const count = Math.ceil(this.scroll.clientHeight / ROW_PX) + 2 * SPARE;
    const shown = this.rows.slice(first, first + count);
    this.space(first, this.rows.length - first - shown.length);
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    const free = this.release(shown);
    let before = this.above;
    shown.forEach((row, number) => {
      const tr = this.slots.get(row.key) ?? free.pop() ?? newRow();
      this.slots.set(row.key, tr);
      fill(tr, row, this.ownId, first + number);
      if (before.nextSibling !== tr) before.after(tr);
      before = tr;
    });
    for (const tr of free) tr.remove();
  }
  release(shown) {
    const kept = new Set(shown.map((row) => row.key)), free = [];
    for (const [key, tr] of this.slots) {
      if (kept.has(key)) continue;
      free.push(tr);
      this.slots.delete(key);
    }
    return free;
  }
  space(above, below) {
    this.above.style.height = `${above * ROW_PX}px`;
    this.below.style.height = `${below * ROW_PX}px`;
  }
}

function spacer() {
  const tr = document.createElement("tr");
  tr.className = "space";
  tr.setAttribute("aria-hidden", "true");
  return tr;
}

function newRow() {
  const tr = document.createElement("tr");
  for (const name of COLUMNS) {
    const td = document.createElement("td");
    td.className = name;
    tr.append(td);
  }
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.append(document.createElement("i"));
  tr.cells[2].append(bar, document.createElement("b"));
  return tr;
}

function fill(tr, row, ownId, number) {
  const now = row.now, [id, phase, slack, buffer, read, sent, rate, parks] = tr.cells;
  setData(tr, "id", now.id);
  setData(tr, "phase", row.phase);
  setData(tr, "mark", row.mark?.what ?? "");
  setData(tr, "own", String(now.id === ownId));
  setData(tr, "consumed", fixed(now.consumed_tokens, 0));
  tr.setAttribute("aria-rowindex", number + 2);
  setText(id, now.id === ownId ? `${now.id.slice(0, 8)} (yours)` : now.id.slice(0, 12));
  if (id.title !== now.id) id.title = now.id;
  setText(phase, row.phase);
  const width = `${Math.min((now.slack_s ?? 0) / BAR_S, 1) * 100}%`;
  const bar = slack.firstChild.firstChild;
  if (bar.style.width !== width) bar.style.width = width;
  setText(slack.lastChild, fixed(now.slack_s, now.slack_s < 100 ? 1 : 0));
  setText(buffer, whole(now.buffer_tokens));
  setText(read, whole(now.consumed_tokens));
  setText(sent, whole(now.generated_tokens));
  setText(rate, now.class === "batch" ? "batch" : now.class === "agent" ? "∞" : fixed(now.read_rate_tok_s, 1));
  setText(parks, whole(now.parks));
}
