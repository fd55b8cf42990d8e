/* A reader of a TokenFlow server for pages: text at reading pace, reports of what was read, stalls.
 *
 * Owns pacing and reports of one page's streams; draws nothing and keeps no text longer than its stream. Invariant: a
 * stream that did not end as the server ends one throws; nothing is ever asked for a second time. One file, so that a
 * page can take it as it is.
 *
 *     for await (const { text } of stream({ url, body, readRate: 8 })) out.append(text);
 *
 * Pacing is as core/qoe.py has it, on a clock that stands still while the page is hidden:
 *     a_j arrival, d_j shown, R tokens/s     d_1 = a_1     d_j = max(a_j, d_{j-1} + 1/R)
 */

// ---- pacing: pure, times in seconds are passed in

const STALL_GRACE_S = 0.25;
const ROUNDING_S = 1e-9;
// A pull this much late is a timer's jitter: taken for the reader's own pause, it would slow down every quick reader.
const JITTER_S = 0.05;

/** A clock that can stand still. `readerS` turns the page's time into it. */
export const newClock = () => ({ lostS: 0, stoppedS: null });
export const stopClock = (clock, nowS) => (clock.stoppedS === null ? { ...clock, stoppedS: nowS } : clock);
export const startClock = (clock, nowS) =>
  clock.stoppedS === null ? clock : { lostS: clock.lostS + nowS - clock.stoppedS, stoppedS: null };
export const readerS = (clock, nowS) => (clock.stoppedS ?? nowS) - clock.lostS;

/** Where a reader is: it was shown `size` tokens at shownS, after `before` others. shownS null = nothing yet. */
export const newPace = (rateTokS) => ({ rateTokS, shownS: null, size: 0, before: 0 });
export const withRate = (pace, rateTokS) => ({ ...pace, rateTokS });

/** When the reader wants its next token: 1/R after the last one of the piece it is at. */
export const dueS = (pace) => (pace.shownS === null ? -Infinity : pace.shownS + pace.size / pace.rateTokS);

/** The same for a reader that asks at pulledS only: who does not ask does not read. */
export const wantedS = (pace, pulledS) => (pulledS - dueS(pace) > JITTER_S ? pulledS : dueS(pace));

/** Show a piece of `tokens`: {pace after it, atS, stallS (0 = none)}. Times are of the reader's clock. */
export function show(pace, tokens, arrivedS, pulledS) {
  const wanted = wantedS(pace, pulledS);
  const atS = Math.max(wanted, arrivedS);
  const late = pace.shownS !== null && atS - wanted > STALL_GRACE_S + ROUNDING_S;
  const after = { ...pace, shownS: atS, size: tokens, before: pace.before + pace.size };
  return { pace: after, atS, stallS: late ? atS - wanted : 0 };
}

/** Tokens read by nowS: of a piece of several, one each 1/R. */
export function readTokens(pace, nowS) {
  if (pace.shownS === null) return 0;
  if (pace.size <= 1 || pace.rateTokS === Infinity) return pace.before + pace.size;
  const since = Math.max(nowS - pace.shownS, 0) * pace.rateTokS;
  return pace.before + Math.min(pace.size, Math.floor(since + ROUNDING_S) + 1);
}

// ---- wire formats: pure

/** Takes a reply's text as it comes and returns the `data` of each event that is complete; skips comments. */
export function sseParser() {
  let rest = "", data = [];
  return (text) => {
    const events = [];
    // A \r at the end may be half of a \r\n.
    const lines = (rest + text).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) events.push(data.join("\n"));
        data = [];
      } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    }
    return events;
  };
}

/** Turns chunks into pieces and counts: from usage where the server tells it, else one token for each with text. */
export function pieceCounter() {
  const choices = new Map(); // index -> {given, seen}: tokens in pieces, tokens the server counted
  return (chunk) => {
    const pieces = [];
    for (const choice of chunk.choices ?? []) {
      const index = choice.index ?? 0;
      const count = choices.get(index) ?? choices.set(index, { given: 0, seen: 0 }).get(index);
      const delta = choice.delta ?? {};
      const reasoning = !delta.content && Boolean(delta.reasoning_content);
      const text = choice.text || delta.content || delta.reasoning_content || "";
      const used = chunk.usage?.completion_tokens;
      count.seen = used ?? count.seen + (text ? 1 : 0);
      // Tokens without text (half a character) are read with the text that they become part of.
      if (!text && !delta.tool_calls?.length) continue;
      pieces.push({ text, tokens: Math.max(count.seen - count.given, 0), index, reasoning, chunk });
      count.given = Math.max(count.seen, count.given);
    }
    return pieces;
  };
}

// ---- errors

/** The server said no before anything was streamed. `status`, `error`: its own words. */
export class RequestRefused extends Error {
  constructor(status, error) {
    super(`${status}: ${error?.message ?? "refused"}`);
    Object.assign(this, { name: "RequestRefused", status, error });
  }
}

/** The stream ended without [DONE]. `text`, `tokens`: all that was received. */
export class StreamBroken extends Error {
  constructor(why, received, cause) {
    super(`the stream broke after ${received.tokens} tokens: ${why}`, { cause });
    Object.assign(this, { name: "StreamBroken", ...received });
  }
}

// ---- reports over HTTP: one request for all streams of the page

const ACK_EVERY_MS = 500;
const MAX_ITEMS = 1000; // of one request, as the server has it
const reporters = new Map();

class Reporter {
  constructor(url, headers) {
    Object.assign(this, { url, headers, streams: new Set(), timer: null });
  }
  static of(url, headers) {
    const key = JSON.stringify([url, headers]);
    return reporters.get(key) ?? reporters.set(key, new Reporter(url, headers)).get(key);
  }
  add(reader) {
    this.streams.add(reader);
    this.timer ??= setInterval(() => this.send(), ACK_EVERY_MS);
  }
  remove(reader) {
    this.streams.delete(reader);
    if (this.streams.size) return;
    clearInterval(this.timer);
    this.timer = null;
  }
  async send() {
    const acks = [...this.streams].flatMap((r) => r.news().map((n) => ({ id: r.id, token: r.token, ...n })));
    for (let from = 0; from < acks.length; from += MAX_ITEMS) {
      const body = JSON.stringify({ acks: acks.slice(from, from + MAX_ITEMS) });
      const headers = { "content-type": "application/json", ...this.headers };
      // A report that is lost costs nothing: the next one tells it all.
      await fetch(this.url, { method: "POST", headers, body, keepalive: true }).catch(() => {});
    }
  }
}

// ---- transports: each calls started(), chunk(), end() or broke() of its reader

async function overSse(reader, { url, body, apiKey }, signal) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  const path = body.messages ? "/v1/chat/completions" : "/v1/completions";
  const reply = await fetch(url + path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json", ...headers },
  });
  if (!reply.ok) {
    const said = await reply.json().catch(() => null);
    throw new RequestRefused(reply.status, said?.error ?? said);
  }
  const [id, token] = ["x-tokenflow-request-id", "x-tokenflow-ack-token"].map((name) => reply.headers.get(name));
  const reporter = id && token ? Reporter.of(`${url}/tokenflow/ack`, headers) : null;
  reader.started(id, token, reporter && (() => reporter.send()));
  reporter?.add(reader);
  try {
    const parse = sseParser(), decoder = new TextDecoder(), from = reply.body.getReader();
    for (let part = await from.read(); !part.done; part = await from.read()) {
      for (const data of parse(decoder.decode(part.value, { stream: true }))) {
        if (data === "[DONE]") return reader.end();
        reader.chunk(JSON.parse(data));
      }
    }
    reader.broke("the connection ended");
  } finally {
    reporter?.remove(reader);
  }
}

async function overWebSocket(reader, { url, body, apiKey }, signal) {
  const at = new URL(`${url}/tokenflow/stream`, globalThis.location?.href);
  at.protocol = at.protocol.replace("http", "ws");
  const socket = new WebSocket(at, apiKey ? ["tokenflow", `tokenflow-key.${apiKey}`] : ["tokenflow"]);
  const send = (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message));
  const report = () => reader.news().forEach((news) => send({ type: "ack", ...news }));
  let timer = null, isStarted = false;
  signal.addEventListener("abort", () => {
    send({ type: "cancel" });
    socket.close();
  });
  return new Promise((resolve, reject) => {
    const started = (id) => {
      isStarted = true;
      reader.started(id, null, report);
      timer = setInterval(report, ACK_EVERY_MS);
    };
    socket.onopen = () => send(body);
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(data);
      if (!message.type) return reader.chunk(message);
      if (message.type === "started") return started(message.id);
      if (message.type === "done") reader.end();
      else if (message.type !== "error") return; // verdicts: the next report tells it all
      else if (message.ended === false && isStarted) return; // of a report of ours: the stream goes on
      else if (isStarted) reader.broke(message.error?.message ?? "the server failed", message.error);
      else reject(new RequestRefused(message.status, message.error));
      socket.close();
    };
    socket.onclose = ({ code }) => {
      clearInterval(timer);
      if (isStarted) reader.broke(`the socket closed (${code})`); // nothing after an end
      else reject(new RequestRefused(code, { message: "the socket closed before the stream began" }));
      resolve();
    };
  });
}

// ---- one stream

class Reader {
  constructor(options) {
    const { readRate, signal, onStall = () => {} } = options;
    Object.assign(this, { id: null, token: null, stalls: [], text: "", tokens: 0, onStall });
    this.readRate = readRate ?? 6; // the server's own default for who says nothing
    this.over = null; // {why, error}: the last word of the server, or of whoever ended it here
    this.left = new AbortController();
    this._clock = newClock();
    this._paces = new Map(); // by choice: each of n answers has a reader's place
    this._queue = [];
    this._reported = new Map();
    this._count = pieceCounter();
    this._wake = () => {};
    this._report = null;
    this._onVisibility = () => this._visibility();
    globalThis.document?.addEventListener("visibilitychange", this._onVisibility);
    this._visibility();
    if (signal?.aborted) this._leave(signal.reason);
    signal?.addEventListener("abort", () => this._leave(signal.reason));
    if (!this.over) this._run(options);
    this._pieces = this._read();
  }
  [Symbol.asyncIterator]() { return this._pieces; }

  /** Tokens read so far; text and tokens that wait to be read; whether reports reach the server. */
  get readTokens() {
    return [...this._paces.values()].reduce((sum, pace) => sum + readTokens(pace, this._nowS()), 0);
  }
  get ahead() {
    return { text: this._queue.map((p) => p.text).join(""), tokens: this.tokens - this.readTokens };
  }
  get reports() { return this._report !== null; }

  /** From now on. The server learns of it from the reports. */
  setReadRate(rate) {
    this.readRate = checkedRate(rate);
    for (const [index, pace] of this._paces) this._paces.set(index, withRate(pace, this.readRate));
    this._wake();
  }
  /** Ends the stream here and on the server; the iterator ends. */
  cancel() { this._leave(null); }

  /** Reports to make: what was read since the last one. Nothing new, nothing said: a server knows what silence means. */
  news() {
    const items = [];
    for (const [index, pace] of this._paces) {
      const consumed_tokens = readTokens(pace, this._nowS());
      if (consumed_tokens <= (this._reported.get(index) ?? 0)) continue;
      this._reported.set(index, consumed_tokens);
      items.push(index ? { consumed_tokens, index } : { consumed_tokens });
    }
    return items;
  }

  // What the transports call.
  started(id, token, report) { Object.assign(this, { id, token, _report: report }); }
  chunk(chunk) {
    if (chunk.error) return this.broke(chunk.error.message ?? "the server failed", chunk.error);
    for (const piece of this._count(chunk)) {
      this.text += piece.text;
      this.tokens += piece.tokens;
      this._queue.push({ ...piece, arrivedS: this._nowS() });
    }
    this._wake();
  }
  end() { this._finish({ why: "done", error: null }); }
  broke(why, cause) {
    this._finish({ why, error: new StreamBroken(why, { text: this.text, tokens: this.tokens }, cause) });
  }

  _run(options) {
    const { transport = "sse", body, readRate } = options;
    const url = (options.url ?? "").replace(/\/$/, "");
    const rate = readRate === undefined ? {} : { tokenflow: { read_rate: readRate === Infinity ? "inf" : readRate } };
    const stream_options = { ...body.stream_options, include_usage: true, continuous_usage_stats: true };
    const wire = { ...options, url, body: { ...body, ...rate, stream: true, stream_options } };
    const over = transport === "websocket" ? overWebSocket : overSse;
    over(this, wire, this.left.signal).catch((error) => {
      if (error instanceof RequestRefused || this.id === null) this._finish({ why: "refused", error });
      else this.broke(error.message, error);
    });
  }
  _finish(how) {
    this.over ??= how;
    this._wake();
  }
  _leave(error) {
    if (this._queue.length) this.over = null; // the server may be through: its reader was not
    this._queue.length = 0;
    this._finish({ why: "cancelled", error });
    this.left.abort();
  }
  _nowS() { return readerS(this._clock, performance.now() / 1000); }
  _visibility() {
    const hidden = globalThis.document?.visibilityState === "hidden", nowS = performance.now() / 1000;
    this._clock = hidden ? stopClock(this._clock, nowS) : startClock(this._clock, nowS);
    if (hidden && !this.over) this._report?.(); // how far the reader came; then silence
    this._wake();
  }

  /** The piece that is shown first: each choice has its own pace. */
  _next() {
    const heads = new Map();
    for (const piece of this._queue) if (!heads.has(piece.index)) heads.set(piece.index, piece);
    const at = (piece) => dueS(this._paces.get(piece.index) ?? newPace(this.readRate));
    return [...heads.values()].sort((a, b) => at(a) - at(b))[0];
  }
  async *_read() {
    try {
      for (;;) {
        const piece = await this._pull(this._nowS());
        if (!piece) break;
        yield piece;
      }
      if (this.over.error) throw this.over.error;
    } finally {
      globalThis.document?.removeEventListener("visibilitychange", this._onVisibility);
      this._leave(null);
    }
  }
  async _pull(pulledS) {
    for (;;) {
      const piece = this._next();
      if (!piece && this.over) return null;
      const pace = piece && (this._paces.get(piece.index) ?? newPace(this.readRate));
      const waitS = piece ? wantedS(pace, pulledS) - this._nowS() : Infinity;
      if (waitS <= 0 && this._clock.stoppedS === null) return this._show(piece, pace, pulledS);
      await this._sleep(this._clock.stoppedS === null ? waitS : Infinity);
    }
  }
  _sleep(seconds) {
    return new Promise((resolve) => {
      const timer = seconds < Infinity ? setTimeout(resolve, Math.max(seconds, 0) * 1000) : null;
      this._wake = () => { clearTimeout(timer); resolve(); };
    });
  }
  _show(piece, pace, pulledS) {
    const { arrivedS, ...shown } = piece;
    const after = show(pace, piece.tokens, arrivedS, pulledS);
    this._queue.splice(this._queue.indexOf(piece), 1);
    this._paces.set(piece.index, after.pace);
    if (after.stallS > 0) {
      const stall = { seconds: after.stallS, index: piece.index, afterTokens: after.pace.before };
      this.stalls.push(stall);
      this.onStall(stall);
    }
    return shown;
  }
}

function checkedRate(rate) {
  if (rate === Infinity || (typeof rate === "number" && rate >= 0.1 && rate <= 1000)) return rate;
  throw new RangeError(`readRate: ${rate} is not valid; valid is a number of tokens/s from 0.1 to 1000, or Infinity`);
}

/**
 * Ask, and read the answer at reading pace.
 * url: of the server, without a path ("" = this page's own). body: an OpenAI chat (messages) or completion (prompt) body.
 * readRate: tokens/s, 0.1 to 1000 or Infinity. transport: "sse" (default) or "websocket". signal: an AbortSignal.
 * onStall({seconds, index, afterTokens}): a gap of more than 1/R + 250 ms, once it is over.
 * Gives pieces {text, tokens, index (of the choice, for n > 1), reasoning, chunk}; throws RequestRefused, StreamBroken.
 */
export function stream(options) {
  if (!options?.body?.messages && options?.body?.prompt === undefined) {
    throw new TypeError("body: messages (chat) or prompt (completion) is missing");
  }
  if (!["sse", "websocket", undefined].includes(options.transport)) {
    throw new TypeError(`transport: ${options.transport} is not valid; valid is "sse" or "websocket"`);
  }
  if (options.readRate !== undefined) checkedRate(options.readRate);
  return new Reader(options);
}
