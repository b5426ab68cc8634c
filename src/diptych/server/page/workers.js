// A cluster's workers: what each does, and what its links carry. Not there for one engine.
import { short } from "./charts.js";

const el = (id) => document.getElementById(id);
let before = null; // {now_s, sent, received} by worker, of the last frame

export function drawWorkers(frame) {
  const workers = frame.workers ?? [];
  el("workers").hidden = workers.length === 0;
  if (workers.length === 0) return;
  const rows = workers.map((one) => {
    const last = before?.[one.name];
    const elapsed = last ? Math.max(0.05, frame.now_s - last.now_s) : null;
    const rate = (now, then) => (elapsed === null ? "-" : `${short(Math.max(0, now - then) / elapsed)}B/s`);
    const word = one.is_up ? (one.is_draining ? "draining" : "up") : "lost";
    const deaths = one.deaths > 0 ? `${word}, lost ${one.deaths}x` : word;
    if (!one.is_up) return [one.name, one.pool, deaths, "", "", "", "", "", "", "", ""];
    return [one.name, one.pool, deaths, one.running, one.waiting, `${Math.round(100 * one.kv_use)} %`, one.reading, one.receiving, rate(one.sent_bytes, last?.sent), rate(one.received_bytes, last?.received), one.recomputed_tokens];
  });
  before = Object.fromEntries(workers.map((one) => [one.name, { now_s: frame.now_s, sent: one.sent_bytes, received: one.received_bytes }]));
  const up = workers.filter((one) => one.is_up).length;
  el("workers-text").textContent = `${up} of ${workers.length} up`;
  const body = el("workers-rows");
  rows.forEach((cells, place) => {
    const line = body.rows[place] ?? body.insertRow();
    while (line.cells.length < cells.length) line.insertCell();
    cells.forEach((cell, column) => { line.cells[column].textContent = cell; });
  });
  while (body.rows.length > rows.length) body.deleteRow(-1);
}
