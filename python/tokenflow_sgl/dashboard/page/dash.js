/* The page: asks for the state twice a second at most, and draws it once a frame.
 *
 * Owns the poll, the figures and the measure of its own speed. Invariant: a page that is hidden asks nothing.
 */

import { Chat } from "./chat.js";
import { Lanes } from "./lanes.js";
import { PHASES, newModel, phaseCounts, sorted, take, total } from "./model.js";
import { Table } from "./table.js";

const POLL_MS = 500;
const PAINTS_KEPT = 60;
const by = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const rounded = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const shown = (value, format = count) => (value === null || value === undefined ? "–" : format.format(value));

const model = newModel();
const lanes = new Lanes(by("lanes"));
const table = new Table(by("streams"), by("scroll"));
const chat = new Chat(async () => (await getJson("v1/models")).data[0].id);
const paints = [];
const figures = new Map(); // label -> its <dd>

async function get(path) {
  const reply = await fetch(path);
  const text = await reply.text();
  if (!reply.ok) throw new Error(`${reply.status} for ${path}: ${wordsOf(text)}`);
  return text;
}
const getJson = async (path) => JSON.parse(await get(path));

function wordsOf(text) {
  try {
    const said = JSON.parse(text);
    return said.error?.message ?? said.error ?? text;
  } catch {
    return text.slice(0, 200);
  }
}

function trouble(error) {
  const wantsKey = /^40[13] /.test(error?.message ?? "") ? " Start the page with --admin-key (or --api-key)." : "";
  by("trouble").hidden = !error;
  by("trouble").textContent = error ? error.message + wantsKey : "";
}

async function poll() {
  const began = performance.now();
  try {
    const text = await get(`tokenflow/state?since=${model.since}`);
    const arrived = performance.now();
    take(model, JSON.parse(text), arrived / 1000);
    trouble(null);
    requestAnimationFrame(() => {
      draw();
      requestAnimationFrame(() => painted(performance.now() - arrived));
    });
  } catch (error) {
    trouble(error);
  }
  if (document.visibilityState === "hidden") return void addEventListener("visibilitychange", poll, { once: true });
  setTimeout(poll, Math.max(POLL_MS - (performance.now() - began), POLL_MS / 2));
}

function painted(ms) {
  paints.push(ms);
  if (paints.length > PAINTS_KEPT) paints.shift();
  const most = Math.max(...paints);
  by("paint-ms").textContent = `${ms.toFixed(0)} ms, at most ${most.toFixed(0)}`;
  const data = by("paint").dataset;
  Object.assign(data, { lastMs: ms.toFixed(1), mostMs: most.toFixed(1), count: Number(data.count ?? 0) + 1 });
}

function draw() {
  const rows = sorted(model, by("sort").value, chat.id);
  const nowS = performance.now() / 1000;
  table.show(rows, chat.id);
  by("empty").hidden = rows.length > 0;
  by("count").textContent = rows.length;
  lanes.draw([...model.rows.values()], nowS, chat.id);
  drawPhases(phaseCounts(rows));
  drawTiles();
  drawEvents(nowS);
  drawCounters();
}

/** Set one figure of a list, made when it is first needed. */
function figure(list, name, text, share = null) {
  let value = figures.get(list.id + name);
  if (!value) {
    const box = document.createElement("div"), term = document.createElement("dt");
    term.textContent = name;
    value = document.createElement("dd");
    box.append(term, value);
    if (share !== null) box.append(Object.assign(document.createElement("span"), { className: "bar" }));
    if (share !== null) box.lastChild.append(document.createElement("i"));
    list.append(box);
    figures.set(list.id + name, value);
  }
  if (value.textContent !== text) value.textContent = text;
  if (share !== null) value.nextSibling.firstChild.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
  return value.parentNode;
}

function drawPhases(counts) {
  for (const phase of PHASES) figure(by("phases"), phase, String(counts[phase])).dataset.phase = phase;
  const said = PHASES.map((phase) => `${counts[phase]} ${phase}`).join(", ");
  if (by("lanes").getAttribute("aria-label") !== said) by("lanes").setAttribute("aria-label", said);
}

function drawTiles() {
  const tiles = by("tiles");
  for (const tier of ["device", "host"]) {
    const [all, free] = [total(model, "memory", `${tier}_total_tokens`), total(model, "memory", `${tier}_free_tokens`)];
    const used = all === null ? null : all - free;
    figure(tiles, `${tier} memory, tokens`, `${shown(used)} of ${shown(all)}`, all ? used / all : 0);
  }
  const copies = [total(model, "memory", "storing_tokens"), total(model, "memory", "loading_tokens")];
  figure(tiles, "open copies, tokens", `${shown(copies[0])} out, ${shown(copies[1])} back`);
  const forecast = model.ranks[0]?.forecast;
  figure(tiles, "arrivals per second", `${shown(forecast?.arrivals_per_s.fast)} now, ${shown(forecast?.arrivals_per_s.slow)} usual`);
  figure(tiles, forecast ? `forecast for ${shown(forecast.horizon_s)} s, tokens` : "forecast", shown(forecast?.demand_tokens, rounded));
  const off = forecast?.error_ratio;
  figure(tiles, "copies ahead", `${forecast?.mode ?? "–"}${typeof off === "number" ? `, off by ${shown(off * 100, rounded)}%` : ""}`);
}

function drawEvents(nowS) {
  const list = by("events"), items = model.events.slice(0, 12);
  while (list.children.length < items.length) list.append(document.createElement("li"));
  while (list.children.length > items.length) list.lastChild.remove();
  items.forEach(({ what, key, tokens, atS }, number) => {
    const item = list.children[number];
    const did = what === "park" ? `parked with ${tokens} tokens` : `returned, ${tokens} tokens computed again`;
    const text = `${Math.max(nowS - atS, 0).toFixed(0)} s ago: ${key.slice(0, 12)} ${did}`;
    if (item.textContent !== text) item.textContent = text;
    Object.assign(item.dataset, { what, id: key });
  });
}

function drawCounters() {
  const names = Object.keys(model.ranks[0]?.counters ?? {});
  for (const name of names) figure(by("counters"), name.replaceAll("_", " "), shown(total(model, "counters", name)));
}

async function introduce() {
  const info = await getJson("dash/info");
  const uses = { api: "its API key for the chat box and its reports", admin: "its admin key for the state" };
  by("keys").textContent = info.keys.length
    ? `Watching ${info.server} with ${info.keys.map((name) => uses[name]).join(" and ")}; the keys stay in the page's server.`
    : `Watching ${info.server} without keys.`;
  const config = await getJson("tokenflow/config");
  by("about").textContent = `${info.server.replace(/^https?:\/\//, "")}, policy ${config.policy}, SGLang ${config.release}`;
  if (info.websocket && config.websocket === true) chat.offerWebSocket();
}

for (const phase of PHASES) {
  const item = document.createElement("li");
  item.dataset.phase = phase;
  item.textContent = phase;
  by("legend").append(item);
}
by("sort").addEventListener("change", () => requestAnimationFrame(draw));
addEventListener("resize", () => requestAnimationFrame(draw));
introduce().catch(trouble);
poll();
