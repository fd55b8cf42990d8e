/* The last minute as a picture: a line for each stream, its phase as a colour, now at the right edge.
 *
 * Owns the canvas. Invariant: what it costs grows with the changes of phase in view, not with time.
 */

import { WINDOW_S } from "./model.js";

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
  }
  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["running", "prefill", "loading", "parked", "waiting", "line", "faint", "own"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  draw(rows, nowS, ownId) {
    const { canvas, context } = this, scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const bottom = height - 14, x = (atS) => Math.max(0, width * (1 - (nowS - atS) / WINDOW_S));
    this.axis(width, bottom, height);
    const each = Math.min(14, bottom / Math.max(rows.length, 1));
    rows.forEach((row, number) => {
      const y = number * each, thick = Math.max(each - (each >= 3 ? 1 : 0), 0.5);
      row.runs.forEach((run, at) => {
        const endS = row.runs[at + 1]?.fromS ?? row.goneS ?? nowS;
        if (endS < nowS - WINDOW_S) return;
        context.fillStyle = this.colours[run.phase] ?? this.colours.faint;
        context.fillRect(x(run.fromS), y, Math.max(x(endS) - x(run.fromS), 1), thick);
      });
      if (row.now.id !== ownId) return;
      context.strokeStyle = this.colours.own;
      context.lineWidth = 2;
      context.strokeRect(1, y, width - 2, Math.max(thick, 2));
    });
  }
  axis(width, bottom, height) {
    const { context, colours } = this;
    context.font = "11px system-ui, sans-serif";
    for (let ago = 0; ago <= WINDOW_S; ago += 15) {
      const at = width * (1 - ago / WINDOW_S);
      context.fillStyle = colours.line;
      context.fillRect(Math.min(at, width - 1), 0, 1, bottom);
      context.fillStyle = colours.faint;
      context.textAlign = ago === 0 ? "right" : ago === WINDOW_S ? "left" : "center";
      context.fillText(ago === 0 ? "now" : `−${ago} s`, at, height - 2);
    }
  }
}
