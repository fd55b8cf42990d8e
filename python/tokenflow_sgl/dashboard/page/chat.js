/* The chat box: one question, its answer at reading pace.
 *
 * Owns the form and the answer; what is read, and when, is tokenflow.js's. Invariant: a model's text is text, never markup.
 */

import { stream } from "./tokenflow.js";

const REDRAW_MS = 200;
const by = (id) => document.getElementById(id);

export class Chat {
  constructor(modelName) {
    this.modelName = modelName; // called when a question is asked
    this.reader = null;
    by("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    by("stop").addEventListener("click", () => this.reader?.cancel());
    by("rate").addEventListener("input", () => {
      by("rate-shown").textContent = by("rate").value;
      this.reader?.setReadRate(Number(by("rate").value));
    });
  }
  get id() { return this.reader?.id ?? null; }

  offerWebSocket() {
    by("over").hidden = false;
    if (by("transport").length === 1) by("transport").append(new Option("WebSocket", "websocket"));
  }

  async ask() {
    by("read").replaceChildren();
    by("stalls").replaceChildren();
    by("send").disabled = true;
    by("stop").disabled = false;
    const timer = setInterval(() => this.draw(), REDRAW_MS);
    let end = "read to the end";
    try {
      const body = { model: await this.modelName(), max_tokens: Number(by("limit").value),
        messages: [{ role: "user", content: by("prompt").value }] };
      const [readRate, transport] = [Number(by("rate").value), by("transport").value];
      this.reader = stream({ url: "", body, readRate, transport, onStall });
      for await (const { text } of this.reader) {
        by("read").append(text);
        this.draw();
      }
      if (this.reader.over.why === "cancelled") end = "stopped";
    } catch (error) {
      end = error.message;
    } finally {
      clearInterval(timer);
      this.draw(end);
      by("send").disabled = false;
      by("stop").disabled = true;
      this.reader = null;
    }
  }

  draw(end = null) {
    const reader = this.reader;
    if (!reader) return void (by("chat-state").textContent = end ?? "asking");
    const ahead = reader.ahead, box = by("answer");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (by("ahead").textContent !== ahead.text) by("ahead").textContent = ahead.text;
    if (follows && by("ahead").offsetTop) box.scrollTop = by("ahead").offsetTop - box.clientHeight / 2;
    const stalls = reader.stalls.length === 1 ? "1 stall" : `${reader.stalls.length} stalls`;
    const counts = `${reader.readTokens} read, ${ahead.tokens} ahead, ${stalls}`;
    const silent = reader.reports || !reader.id ? "" : ", reports do not reach the server";
    by("chat-state").textContent = [end ?? (reader.tokens ? "reading" : "waiting"), counts + silent].join(": ");
    Object.assign(by("answer").dataset, { id: reader.id ?? "", read: reader.readTokens, received: reader.tokens });
  }
}

function onStall({ seconds, afterTokens }) {
  const item = document.createElement("li");
  item.textContent = `stalled ${seconds.toFixed(1)} s after ${afterTokens} tokens`;
  by("stalls").append(item);
}
