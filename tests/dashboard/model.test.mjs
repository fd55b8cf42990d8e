// What the page makes of states: phases over time, parks and returns, ranks, a server that restarts.
import assert from "node:assert/strict";
import test from "node:test";

const { newModel, phaseCounts, sorted, take, total } = await import(process.env.MODULE);

const row = (id, phase, more) => ({ id, phase, class: "reader", slack_s: 1, buffer_tokens: 6, ...more });
const event = (seq, what, id, at_s) => ({ seq, what, id, at_s, tokens: 32 });
const state = (seq, now_s, streams, transitions = []) => ({ seq, now_s, streams, transitions, memory: { host_free_tokens: 5 } });
const runs = (model, key) => model.rows.get(key).runs.map((run) => [run.phase, run.fromS]);

test("a park and a return between two states are in the picture at the time they happened", () => {
  const model = newModel();
  take(model, state(1, 10, [row("a", "running")]), 100); // the page's clock is 90 s ahead of the server's
  const news = [event(2, "park", "a", 10.2), event(3, "load", "a", 10.4), event(4, "return", "a", 11)];
  take(model, state(4, 11.5, [row("a", "running")], news), 101.5);
  assert.deepEqual(runs(model, "a"), [["running", 100], ["parked", 100.2], ["loading", 100.4], ["running", 101]]);
  assert.deepEqual(model.events.map((e) => e.what), ["return", "park"]);
  assert.equal(model.since, 4);
});

test("a parked stream whose pages are on their way back is loading until it is back", () => {
  const model = newModel();
  take(model, state(1, 0, [row("a", "parked")]), 0);
  take(model, state(2, 1, [row("a", "parked")], [event(2, "load", "a", 0.5)]), 1);
  assert.deepEqual(phaseCounts(sorted(model, "arrival", null)).loading, 1);
  take(model, state(3, 2, [row("a", "running")], [event(3, "return", "a", 1.5)]), 2);
  assert.deepEqual(phaseCounts(sorted(model, "arrival", null)).loading, 0);
});

test("what is told twice is taken once, and what was before the page is not taken", () => {
  const model = newModel(), park = event(2, "park", "a", 1);
  take(model, state(1, 0, [row("a", "running")], [event(1, "park", "a", 0)]), 0);
  take(model, state(2, 1, [row("a", "parked")], [park]), 1);
  take(model, state(2, 2, [row("a", "parked")], [park]), 2);
  assert.equal(model.events.length, 1);
});

test("streams of several ranks stand side by side, and each rank has its own number", () => {
  const model = newModel();
  take(model, { ranks: [state(7, 0, [row("a", "running")]), state(3, 50, [row("a", "parked")])] }, 10);
  assert.deepEqual(sorted(model, "arrival", null).map((r) => r.key), ["0/a", "1/a"]);
  assert.deepEqual([model.since, total(model, "memory", "host_free_tokens")], [3, 10]);
});

test("a server that restarted is a new one", () => {
  const model = newModel();
  take(model, state(90, 500, [row("old", "running")]), 0);
  take(model, state(1, 2, [row("new", "running")]), 1);
  assert.deepEqual(sorted(model, "arrival", null).map((r) => r.key), ["new"]);
});

test("the page's own stream is first in every order", () => {
  const model = newModel();
  take(model, state(1, 0, [row("a", "running", { slack_s: 3 }), row("b", "waiting", { slack_s: null }), row("me", "running")]), 0);
  for (const by of ["arrival", "slack", "buffer", "phase"]) assert.equal(sorted(model, by, "me")[0].key, "me");
  assert.deepEqual(sorted(model, "slack", null).map((r) => r.key), ["me", "a", "b"]);
});

test("a stream that ended leaves the table at once and the picture after a minute", () => {
  const model = newModel();
  take(model, state(1, 0, [row("a", "running")]), 0);
  take(model, state(2, 1, [], [event(2, "finish", "a", 0.5)]), 1);
  assert.deepEqual([sorted(model, "arrival", null).length, model.rows.size], [0, 1]);
  take(model, state(2, 70, []), 70);
  assert.equal(model.rows.size, 0);
});
