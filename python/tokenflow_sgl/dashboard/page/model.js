/* What the page knows: streams, their phases over time, what happened; from replies of /tokenflow/state.
 *
 * Owns no element and no clock (nowS, seconds of the page, is passed in). Invariant: no transition is taken twice.
 */

export const PHASES = ["running", "prefill", "loading", "parked", "waiting"];
export const WINDOW_S = 60;
const EVENTS_KEPT = 40;
const MARK_S = 2.5; // for which a row shows that it was parked or came back

export const newModel = () => ({ rows: new Map(), events: [], ranks: [], arrivals: 0, since: 0, nowS: 0 });

const startsPhase = { park: "parked", return: "running", load: "loading", admit: "running", recompute: "parked" };

/** Take one reply. Several data-parallel ranks have a number, and a clock, each. */
export function take(model, state, nowS) {
  const states = state.ranks ?? [state];
  if (states.some((s, i) => (s.seq ?? 0) < (model.ranks[i]?.seq ?? 0))) Object.assign(model, newModel()); // it restarted
  model.nowS = nowS;
  const live = new Set();
  states.forEach((rank, number) => {
    const seen = model.ranks[number]?.seq ?? 0;
    const key = (id) => (states.length > 1 ? `${number}/${id}` : id);
    const at = (serverS) => nowS + serverS - rank.now_s;
    // An idle server's clock stands still: what happened before the page looked has no time on the page's.
    const news = model.ranks[number] ? (rank.transitions ?? []) : [];
    for (const t of news) if (t.seq > seen) happened(model, key(t.id), t, at(t.at_s));
    for (const row of rank.streams ?? []) {
      live.add(key(row.id));
      update(model, key(row.id), row, nowS);
    }
    model.ranks[number] = rank;
  });
  model.since = Math.min(...states.map((s) => s.seq ?? 0));
  for (const [key, row] of model.rows) {
    if (!live.has(key)) row.goneS ??= nowS;
    if (row.goneS !== null && row.goneS < nowS - WINDOW_S) model.rows.delete(key);
  }
}

function lane(model, key) {
  const known = model.rows.get(key);
  if (known && known.goneS === null) return known;
  const row = { key, id: key, order: model.arrivals++, phase: "waiting", runs: [], mark: null, goneS: null, last: null, now: {} };
  model.rows.set(key, row);
  return row;
}

function happened(model, key, { what, tokens }, atS) {
  if (what === "finish") {
    const row = model.rows.get(key);
    if (row) row.goneS = atS;
    return;
  }
  if (atS < model.nowS - WINDOW_S) return;
  const row = lane(model, key);
  row.last = what;
  if (startsPhase[what]) enter(row, startsPhase[what], atS);
  if (what !== "park" && what !== "return") return;
  row.mark = { what, untilS: atS + MARK_S };
  model.events.unshift({ what, key, tokens, atS });
  model.events.length = Math.min(model.events.length, EVENTS_KEPT);
}

function update(model, key, now, nowS) {
  const row = lane(model, key);
  row.now = now;
  // The state calls a stream parked until it is back; that its pages are on their way only its last load tells.
  row.phase = row.last === "load" && (now.phase === "parked" || now.phase === "waiting") ? "loading" : now.phase;
  enter(row, row.phase, nowS);
  if (row.mark && row.mark.untilS < nowS) row.mark = null;
}

function enter(row, phase, atS) {
  const last = row.runs.at(-1);
  if (last?.phase === phase) return;
  row.runs.push({ phase, fromS: Math.max(atS, last?.fromS ?? -Infinity) });
  while (row.runs.length > 1 && row.runs[1].fromS < atS - WINDOW_S) row.runs.shift();
}

const missingLast = (value) => value ?? Infinity;
const orders = {
  arrival: (a, b) => a.order - b.order,
  slack: (a, b) => missingLast(a.now.slack_s) - missingLast(b.now.slack_s) || a.order - b.order,
  buffer: (a, b) => (b.now.buffer_tokens ?? -1) - (a.now.buffer_tokens ?? -1) || a.order - b.order,
  phase: (a, b) => PHASES.indexOf(b.phase) - PHASES.indexOf(a.phase) || a.order - b.order,
};

/** The rows in flight; the page's own stream first. */
export function sorted(model, by, ownId) {
  const rows = [...model.rows.values()].filter((row) => row.goneS === null).sort(orders[by]);
  const own = rows.findIndex((row) => row.now.id === ownId);
  if (own > 0) rows.unshift(...rows.splice(own, 1));
  return rows;
}

/** Streams by phase, all ranks together. */
export function phaseCounts(rows) {
  const counts = Object.fromEntries(PHASES.map((phase) => [phase, 0]));
  for (const row of rows) counts[row.phase] = (counts[row.phase] ?? 0) + 1;
  return counts;
}

/** A field of all ranks added up, such as ("memory", "host_free_tokens"); null where no rank has it. */
export function total(model, group, name) {
  const values = model.ranks.map((rank) => rank[group]?.[name]).filter((value) => typeof value === "number");
  return values.length ? values.reduce((a, b) => a + b) : null;
}
