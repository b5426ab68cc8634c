// Drawing on canvas: the timeline of steps, rates over time, distributions. No library; colours come from the style sheet.

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "quiet", "line", "grid", "prefill", "decode", "stall", "free", "card"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export function begin(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = Number(canvas.dataset.height || (canvas.dataset.height = canvas.getAttribute("height")));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  // what would be rounded up to the next power of a thousand has its letter: toPrecision writes 1.00e+3 for it
  if (size >= 999.5e6) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 999.5e3) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size >= 99.5 || Number.isInteger(value)) return `${Math.round(value)}`;
  return value.toPrecision(2);
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds >= 10) return `${seconds.toFixed(1)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1e3;
  return ms >= 100 ? `${ms.toFixed(0)} ms` : ms >= 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`;
}

// as short as the number allows: 5 ms, 250 ms, 1.5 s
export function duration(seconds) {
  const value = Math.abs(seconds) >= 1 ? seconds : seconds * 1e3;
  return `${Number(value.toPrecision(3))} ${Math.abs(seconds) >= 1 ? "s" : "ms"}`;
}

// a request where room is little: how its id begins, and which prompt of its body it is
export function label(id) {
  const [, name, place] = /^(?:(?:chat)?cmpl-)?(.*?)(-\d{1,3})?$/s.exec(id);
  return name.slice(0, 12 - (place ?? "").length) + (place ?? "");
}

// 1, 2 or 5 times a power of ten, of which about `parts` fit into span
function roundStep(span, parts) {
  const least = span / parts;
  const decade = 10 ** Math.floor(Math.log10(least));
  return decade * [1, 2, 5, 10].find((times) => times * decade >= least * 0.999);
}

const LABELS = 92;

// steps: [{n, t, s, p, d, chunks: [[id, tokens, cached]], seqs: [id]}] in order; lanes: request ids, newest first;
// times are told from `origin` on: the left end, or now; the step at the pointer, or else the chosen one, is framed and returned
export function drawTimeline(canvas, { steps, lanes, from, span, origin, pointer, chosen }) {
  const { context, width, height } = begin(canvas);
  const colour = colours();
  const left = width < 480 ? 0 : LABELS;
  const top = 18;
  const x = (t) => left + ((t - from) / span) * (width - left);
  const rows = lanes.length + 1;
  const row = Math.min(22, Math.max(7, (height - top) / Math.max(rows, 8)));
  context.fillStyle = colour.quiet;
  context.strokeStyle = colour.grid;
  const gap = roundStep(span, width < 480 ? 4 : 6);
  for (let tick = Math.ceil((from - origin) / gap - 1e-6); origin + tick * gap <= from + span * 1.0001; tick += 1) {
    const place = x(origin + tick * gap);
    context.beginPath();
    context.moveTo(place, top - 4);
    context.lineTo(place, height);
    context.stroke();
    const isLast = width - place < 44;
    context.textAlign = isLast ? "right" : "left";
    context.fillText(tick === 0 ? (origin > from ? "now" : "0") : duration(tick * gap), place + (isLast ? -2 : 2), 11);
  }
  context.textAlign = "left";
  if (left > 0) {
    context.fillText("steps", 2, top + row - 5);
    lanes.forEach((id, lane) => {
      if (row >= 10) context.fillText(label(id), 2, top + (lane + 2) * row - 4);
    });
  }
  const lane = new Map(lanes.map((id, place) => [id, place + 1]));
  let pointed = null;
  for (const step of steps) {
    const start = Math.max(left, x(step.t));
    const end = x(step.t + step.s);
    if (end < left) continue;
    const wide = Math.max(1, end - start - (end - start > 4 ? 1 : 0));
    const mixed = step.p > 0 && step.d > 0;
    const share = step.p / Math.max(1, step.p + step.d);
    const bar = row - 3;
    context.fillStyle = colour.decode;
    context.fillRect(start, top, wide, bar);
    context.fillStyle = colour.prefill;
    context.fillRect(start, top, wide, bar * share);
    for (const [id] of step.chunks) {
      if (lane.has(id)) context.fillRect(start, top + lane.get(id) * row, wide, bar);
    }
    context.fillStyle = mixed ? colour.stall : colour.decode;
    for (const id of step.seqs) {
      if (lane.has(id)) context.fillRect(start, top + lane.get(id) * row + bar * 0.3, wide, bar * 0.45);
    }
    if (step === chosen || (pointer !== null && pointer >= start - 1 && pointer <= start + wide + 1)) pointed = step;
  }
  if (!steps.some((step) => step.t + step.s >= from)) context.fillText("no step has ended in this time", left + 4, top + 40);
  if (pointed !== null) {
    context.strokeStyle = colour.ink;
    context.strokeRect(Math.max(left, x(pointed.t)), top - 2, Math.max(2, x(pointed.t + pointed.s) - x(pointed.t)), height - top);
  }
  return pointed;
}

// `name` per second in each of the frames [{elapsed, busy, ...}], newest last: what a step did is told when it ends, and one that took
// longer than a frame was at it in the frames before, too
export function perSecond(frames, name) {
  const rates = frames.map(() => 0);
  frames.forEach((one, place) => {
    const worked = Math.max(one.elapsed, one.busy);
    let left = worked;
    for (let at = place; at >= 0 && left > 0; at -= 1) {
      const part = Math.min(left, frames[at].elapsed);
      rates[at] += ((one[name] / worked) * part) / frames[at].elapsed;
      left -= part;
    }
  });
  return rates;
}

// series: [{colour, values}], one value for each of `times`, newest last, on one scale; the width is `seconds` up to the newest;
// lines begin anew where `breaks` says so
export function drawRates(canvas, series, times, breaks, seconds) {
  const { context, width, height } = begin(canvas);
  const colour = colours();
  const bottom = height - 14;
  context.strokeStyle = colour.grid;
  for (const share of [0, 0.5, 1]) {
    const y = 6 + (bottom - 6) * share;
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
  }
  const highest = Math.max(1, ...series.flatMap((one) => one.values));
  for (const one of series) {
    context.strokeStyle = colour[one.colour];
    context.lineWidth = 1.8;
    context.beginPath();
    one.values.forEach((value, place) => {
      const px = width * (1 - (times[times.length - 1] - times[place]) / seconds);
      const py = bottom - (value / highest) * (bottom - 6);
      if (place === 0 || breaks[place]) context.moveTo(px, py);
      else context.lineTo(px, py);
    });
    context.stroke();
  }
  context.lineWidth = 1;
  context.fillStyle = colour.quiet;
  context.fillText(`${short(highest)} tokens/s`, 2, 16);
  context.fillText(`-${Math.round(seconds)} s`, 2, height - 2);
  context.textAlign = "right";
  context.fillText("now", width - 2, height - 2);
  context.textAlign = "left";
}

export function quantile(distribution, share) {
  const total = distribution.counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let wanted = share * total;
  for (let place = 0; place < distribution.counts.length; place += 1) {
    const count = distribution.counts[place];
    if (wanted <= count && count > 0) {
      const low = place === 0 ? 0 : distribution.edges[place - 1];
      const high = distribution.edges[place] ?? low * 2;
      return low + (high - low) * (wanted / count);
    }
    wanted -= count;
  }
  return distribution.edges[distribution.edges.length - 1];
}

export function drawDistribution(canvas, distribution, colourName) {
  const { context, width, height } = begin(canvas);
  const colour = colours();
  const counts = distribution.counts;
  const first = counts.findIndex((count) => count > 0);
  context.fillStyle = colour.quiet;
  if (first < 0) {
    context.fillText("nothing measured yet", 4, height / 2);
    return;
  }
  let last = counts.length - 1;
  while (counts[last] === 0) last -= 1;
  const from = Math.max(0, first - 1);
  const to = Math.min(counts.length - 1, last + 1);
  const highest = Math.max(...counts);
  const bottom = height - 16;
  const wide = width / (to - from + 1);
  let taken = 0;
  for (let place = from; place <= to; place += 1) {
    const tall = (counts[place] / highest) * (bottom - 14);
    const px = (place - from) * wide;
    context.fillStyle = colour[colourName];
    context.fillRect(px + 1, bottom - tall, Math.max(1, wide - 2), tall);
    context.fillStyle = colour.quiet;
    context.textAlign = "center";
    if (counts[place] > 0 && wide > 26) context.fillText(short(counts[place]), px + wide / 2, bottom - tall - 3);
    const edge = distribution.edges[place];
    if (edge === undefined) continue;
    const text = duration(edge);
    const half = context.measureText(text).width / 2;
    const middle = Math.min(px + wide, width - half);
    if (middle - half < taken) continue; // an edge without room stays unnamed
    context.fillText(text, middle, height - 3);
    taken = middle + half + 8;
  }
  context.textAlign = "left";
  context.strokeStyle = colour.line;
  context.beginPath();
  context.moveTo(0, bottom + 0.5);
  context.lineTo(width, bottom + 0.5);
  context.stroke();
}
