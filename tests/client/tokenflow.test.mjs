// Pacing, wire formats and the life of a stream, without a browser: run by test_tokenflow_js.py.
import assert from "node:assert/strict";
import test from "node:test";

const tf = await import(process.env.MODULE);

const encoder = new TextEncoder();
const chat = (content, used, index = 0) =>
  ({ choices: [{ index, delta: { content } }], ...(used === undefined ? {} : { usage: { completion_tokens: used } }) });
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} is not ${b}`);

/** Times at which a reader who always asks sees pieces that arrive at `arrivals`, of one token each. */
function shownAt(arrivals, rate) {
  let pace = tf.newPace(rate), pulledS = 0;
  return arrivals.map((arrivedS) => {
    const shown = tf.show(pace, 1, arrivedS, pulledS);
    pace = shown.pace;
    pulledS = shown.atS;
    return shown;
  });
}

test("a token is shown when it is there and the one before it was read", () => {
  // R = 4: d = 1, max(1, 1.25), max(1.1, 1.5), max(3, 1.75), max(3, 3.25)
  assert.deepEqual(shownAt([1, 1, 1.1, 3, 3], 4).map((s) => s.atS), [1, 1.25, 1.5, 3, 3.25]);
});

test("a stall is a gap of more than 1/R and 250 ms, and as long as the gap less 1/R", () => {
  // Due at 1.25: 1.5 is 250 ms late and no stall yet; due at 1.75, 2.05 is.
  const stalls = shownAt([1, 1.5, 2.05], 4).map((s) => s.stallS);
  assert.deepEqual(stalls.slice(0, 2), [0, 0]);
  close(stalls[2], 0.3);
});

test("a piece of several tokens is read one token each 1/R and the next is due after the last", () => {
  const { pace } = tf.show(tf.newPace(2), 4, 10, 0);
  assert.deepEqual([9, 10, 10.4, 10.5, 11.5, 60].map((at) => tf.readTokens(pace, at)), [1, 1, 1, 2, 4, 4]);
  assert.equal(tf.dueS(pace), 12);
});

test("who does not ask does not read, and goes on at its rate when it asks again", () => {
  const first = tf.show(tf.newPace(10), 1, 0, 0);
  const later = tf.show(first.pace, 1, 0.1, 5);
  assert.deepEqual([later.atS, later.stallS], [5, 0]);
  close(tf.show(later.pace, 1, 0.2, 5).atS, 5.1);
});

test("a timer that fires a little late costs a reader nothing", () => {
  const first = tf.show(tf.newPace(100), 1, 0, 0);
  close(tf.show(first.pace, 1, 0, 0.04).atS, 0.01);
});

test("a clock that stood still goes on where it was", () => {
  let clock = tf.newClock();
  assert.equal(tf.readerS(clock, 7), 7);
  clock = tf.stopClock(tf.stopClock(clock, 8), 9);
  assert.equal(tf.readerS(clock, 20), 8);
  clock = tf.startClock(tf.startClock(clock, 20), 25);
  assert.equal(tf.readerS(clock, 21), 9);
});

test("a reader without a limit has read what it was shown", () => {
  const { pace } = tf.show(tf.newPace(Infinity), 3, 1, 0);
  assert.deepEqual([tf.readTokens(pace, 1), tf.dueS(pace)], [3, 1]);
});

test("a new rate holds from the next token on", () => {
  const { pace } = tf.show(tf.newPace(1), 1, 10, 0);
  assert.equal(tf.dueS(tf.withRate(pace, 4)), 10.25);
});

test("events are found however the reply is cut, and comments are none", () => {
  const text = ": quiet\n\ndata: one\r\n\r\ndata:two\n\n: still\ndata: a\ndata: b\r\revent: x\n\n";
  for (let size = 1; size <= text.length; size += 1) {
    const parse = tf.sseParser(), events = [];
    for (let at = 0; at < text.length; at += size) events.push(...parse(text.slice(at, at + size)));
    assert.deepEqual(events, ["one", "two", "a\nb"], `cut every ${size}`);
  }
});

test("tokens are the server's count, and one for each text where it tells none", () => {
  const count = tf.pieceCounter();
  const given = [chat("", 0), chat("a", 1), chat("", 3), chat("b", 4), chat("x", 2, 1)].flatMap(count);
  assert.deepEqual(given.map((p) => [p.text, p.tokens, p.index]), [["a", 1, 0], ["b", 3, 0], ["x", 2, 1]]);
  const plain = tf.pieceCounter();
  assert.deepEqual([chat(""), chat("a"), { choices: [{ text: "b" }] }].flatMap(plain).map((p) => p.tokens), [1, 1]);
});

test("reasoning counts as text that is read", () => {
  const [piece] = tf.pieceCounter()({ choices: [{ delta: { reasoning_content: "hm", content: null } }] });
  assert.deepEqual([piece.text, piece.reasoning, piece.tokens], ["hm", true, 1]);
});

// ---- a whole stream, the network played

const HEADERS = { "x-tokenflow-request-id": "r1", "x-tokenflow-ack-token": "secret" };

/** Replaces fetch; returns the requests seen. The answer to a chat is `parts`, then its end; each part may be a promise. */
function playing(t, parts, { status = 200 } = {}) {
  const seen = [];
  t.mock.method(globalThis, "fetch", async (url, options) => {
    seen.push({ url, body: JSON.parse(options.body), headers: options.headers, signal: options.signal });
    if (url.endsWith("/tokenflow/ack")) return new Response('{"acks": []}');
    const body = new ReadableStream({
      async start(controller) {
        options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
        for (const part of parts) controller.enqueue(encoder.encode(await part));
        controller.close();
      },
    });
    return new Response(body, { status, headers: HEADERS });
  });
  return seen;
}
const event = (chunk) => `data: ${JSON.stringify(chunk)}\n\n`;
const ask = (more) => tf.stream({ url: "http://server", body: { messages: [] }, readRate: 1000, ...more });
async function all(reader) {
  const texts = [];
  for await (const piece of reader) texts.push(piece.text);
  return texts;
}

test("a stream gives its text and asks the server for its rate and counts", async (t) => {
  const seen = playing(t, [event(chat("Hel", 1)), event(chat("lo", 2)), "data: [DONE]\n\n"]);
  assert.deepEqual(await all(ask({ apiKey: "k" })), ["Hel", "lo"]);
  assert.equal(seen[0].url, "http://server/v1/chat/completions");
  assert.equal(seen[0].headers.authorization, "Bearer k");
  assert.deepEqual(seen[0].body, {
    messages: [], stream: true, tokenflow: { read_rate: 1000 },
    stream_options: { include_usage: true, continuous_usage_stats: true },
  });
});

test("a stream that ends without DONE throws after what was received, and is not asked for again", async (t) => {
  const seen = playing(t, [event(chat("half", 1)), event(chat(" done", 2))]);
  const texts = [], reader = ask();
  await assert.rejects(async () => { for await (const p of reader) texts.push(p.text); }, (error) => {
    assert.ok(error instanceof tf.StreamBroken);
    assert.deepEqual([error.text, error.tokens], ["half done", 2]);
    return true;
  });
  assert.deepEqual([texts.join(""), seen.length], ["half done", 1]);
});

test("an error of the server in mid-stream breaks it with the server's words", async (t) => {
  playing(t, [event(chat("a", 1)), event({ error: { message: "out of luck" } }), "data: [DONE]\n\n"]);
  await assert.rejects(all(ask()), /broke after 1 tokens: out of luck/);
});

test("a refused request tells the server's status and words", async (t) => {
  playing(t, ['{"error": {"message": "no such model"}}'], { status: 404 });
  await assert.rejects(all(ask()), (error) => error instanceof tf.RequestRefused && error.status === 404);
});

test("cancel ends the iterator and the request, an abort throws its reason", async (t) => {
  const never = new Promise(() => {});
  const seen = playing(t, [event(chat("a", 1)), never]);
  const reader = ask();
  for await (const piece of reader) if (piece.text) reader.cancel();
  assert.equal(seen[0].signal.aborted, true);

  const abort = new AbortController();
  const aborted = ask({ signal: abort.signal });
  await aborted[Symbol.asyncIterator]().next();
  abort.abort(new Error("enough"));
  await assert.rejects(aborted[Symbol.asyncIterator]().next(), /enough/);
});

test("an answer that is cancelled with text unread was cancelled, though the server was through with it", async (t) => {
  playing(t, [event(chat("a", 1)), event(chat("b", 2)), "data: [DONE]\n\n"]);
  const reader = ask();
  while (reader.over === null) await new Promise(setImmediate);
  for await (const piece of reader) if (piece.text === "a") break;
  assert.equal(reader.over.why, "cancelled");
});

test("reports of all streams of a page go in one request and say nothing when nothing was read", async (t) => {
  t.mock.timers.enable({ apis: ["setInterval"] });
  const seen = playing(t, [event(chat("a", 1)), event(chat("b", 2)), new Promise(() => {})]);
  const readers = [ask(), ask()];
  for (const reader of readers) await reader[Symbol.asyncIterator]().next();
  t.mock.timers.tick(500);
  t.mock.timers.tick(500);
  const reports = seen.filter((s) => s.url === "http://server/tokenflow/ack").map((s) => s.body.acks);
  const item = { id: "r1", token: "secret", consumed_tokens: 1 };
  assert.deepEqual(reports, [[item, item]]);
  for (const reader of readers) reader.cancel();
});

test("a hidden page reads nothing, and goes on without a stall when it is shown", async (t) => {
  const page = new EventTarget();
  page.visibilityState = "hidden";
  globalThis.document = page;
  t.after(() => delete globalThis.document);
  playing(t, [event(chat("a", 1)), event(chat("b", 2)), "data: [DONE]\n\n"]);
  const reader = ask(), pieces = reader[Symbol.asyncIterator]();
  const first = pieces.next();
  while (reader.tokens < 2) await new Promise(setImmediate);
  assert.equal(reader.readTokens, 0);
  page.visibilityState = "visible";
  page.dispatchEvent(new Event("visibilitychange"));
  assert.equal((await first).value.text, "a");
  assert.equal((await pieces.next()).value.text, "b");
  assert.equal((await pieces.next()).done, true);
  assert.deepEqual(reader.stalls, []);
});

test("what is no request, transport or rate is refused by name", () => {
  assert.throws(() => tf.stream({ body: {} }), /body: messages \(chat\) or prompt/);
  assert.throws(() => ask({ transport: "pigeon" }), /transport: pigeon is not valid/);
  for (const rate of [0, 1001, NaN, "8", null]) assert.throws(() => ask({ readRate: rate }), /readRate: .* is not valid/);
});
