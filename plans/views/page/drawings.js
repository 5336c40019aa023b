// The drawings: lanes of operations, memory, and how far a run is behind its plan, on canvases that share one window of
// time. They answer what is at a point and say it in words; what a person does is not theirs.

const BAR = 22, GAP = 8, STRIP = 6, AXIS = 20, WIDE = 640, WORDS = 13;

// Style: the colours of the page as it is now, light or dark.

let paint;
function readStyle() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["ink", "faint", "line", "grid", "plot", "lane", "budget", "focus"];
  paint = Object.fromEntries(names.map((name) => [name, get(name)]));
  paint.works = data.works.map((work) => get(work.colour));
  paint.of = get;
  paint.font = `12px ${getComputedStyle(document.body).fontFamily}`;
}

// The window that all drawings show.

let from = 0, to = whole, frame = 0;
const least = whole * 1e-7;
function look(start, end) {
  const width = Math.min(Math.max(end - start, least), whole);
  from = Math.min(Math.max(start, 0), whole - width);
  to = from + width;
  refresh();
}
function zoom(factor, at = (from + to) / 2) { look(at - (at - from) * factor, at + (to - at) * factor); }
function move(share) { look(from + (to - from) * share, to + (to - from) * share); }
function refresh() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; drawAll(); }); }

const views = [];
let hovered = -1, kept = -1, cursor = null;

function drawAll() {
  for (const view of views) {
    const ratio = window.devicePixelRatio || 1;
    const width = view.canvas.clientWidth, height = view.height(width);
    if (view.canvas.style.height !== `${height}px`) view.canvas.style.height = `${height}px`;
    const across = Math.round(width * ratio), down = Math.round(height * ratio);
    if (view.canvas.width !== across || view.canvas.height !== down) { view.canvas.width = across; view.canvas.height = down; }
    const pen = view.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = paint.font;
    pen.textBaseline = "middle";
    const gutter = width >= WIDE ? 158 : 0;
    const area = { left: gutter, right: width, width: Math.max(width - gutter, 1), height, narrow: gutter === 0 };
    area.x = (time) => area.left + ((time - from) / (to - from)) * area.width;
    area.time = (x) => from + ((x - area.left) / area.width) * (to - from);
    view.area = area;
    pen.save();
    view.draw(pen, area);
    pen.restore();
  }
  const range = document.getElementById("range");
  range.textContent = to - from >= whole * 0.9999 ? `all ${secondsText(whole)}`
    : `${momentText(from, to - from)} to ${momentText(to, to - from)} (${secondsText(to - from)})`;
}

function drawAxis(pen, area, top, bottom) {
  const about = (to - from) / Math.max(area.width / 110, 2), power = 10 ** Math.floor(Math.log10(about));
  const step = [1, 2, 5, 10].map((value) => value * power).find((value) => value >= about);
  pen.textAlign = "center";
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    const x = Math.round(area.x(i * step)) + 0.5;
    pen.fillStyle = paint.grid;
    pen.fillRect(x, top, 1, bottom - top);
    const words = momentText(i * step, step * 300), half = pen.measureText(words).width / 2;
    pen.fillStyle = paint.faint;
    if (x - half >= area.left && x + half <= area.right) pen.fillText(words, x, bottom + AXIS / 2);
  }
}

function drawCursor(pen, area, top, bottom) {
  if (cursor === null || cursor < from || cursor > to) return;
  pen.fillStyle = paint.faint;
  pen.fillRect(Math.round(area.x(cursor)), top, 1, bottom - top);
}

// Of ops in order of start: the first that could still run at `time`.
function firstAt(order, starts, time) {
  let low = 0, high = order ? order.length : starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[order ? order[middle] : middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// Where an op's box lies in its lane, from the top, and how high it is.
function place(step, op, top, height) {
  const slots = step.slots[graph.lane[op]];
  return [top + (height * step.slot[op]) / slots, height / slots];
}

// Operations wide enough to be seen are boxes; of narrower ones each pixel shows the share of time that each work takes.
function drawLane(pen, area, step, lane, top, height, right = area.right) {
  const order = step.lanes[lane], pixels = Math.ceil(right - area.left), kinds = paint.works.length;
  const shares = new Float32Array(pixels * kinds), scale = area.width / (to - from);
  const boxes = [];
  let some = false;
  for (let i = firstAt(order, step.from, from - step.longest[lane]); i < order.length; i++) {
    const op = order[i];
    if (step.from[op] >= to) break;
    const start = Math.max((step.from[op] - from) * scale, 0), end = Math.min((step.to[op] - from) * scale, pixels);
    if (step.to[op] < from) continue;
    if (end - start >= 1.5) { boxes.push(op, start, end); continue; }
    some = true;
    for (let pixel = Math.floor(start); pixel < Math.min(end, pixels); pixel++) {
      shares[pixel * kinds + graph.work[op]] += (Math.min(end, pixel + 1) - Math.max(start, pixel)) / step.slots[lane];
    }
  }
  for (let kind = 0; some && kind < kinds; kind++) {
    pen.fillStyle = paint.works[kind];
    for (let pixel = 0; pixel < pixels; pixel++) {
      const share = shares[pixel * kinds + kind];
      if (!share) continue;
      let below = 0;
      for (let other = 0; other < kind; other++) below += shares[pixel * kinds + other];
      const floor = top + height * (1 - Math.min(below, 1)), ceiling = top + height * (1 - Math.min(below + share, 1));
      pen.fillRect(area.left + pixel, ceiling, 1, Math.max(floor - ceiling, 0.7));
    }
  }
  for (let i = 0; i < boxes.length; i += 3) {
    const [op, start, end] = [boxes[i], boxes[i + 1], boxes[i + 2]], width = end - start;
    pen.fillStyle = paint.works[graph.work[op]];
    const [above, high] = place(step, op, top, height);
    pen.fillRect(area.left + start, above, width > 3 ? width - 0.6 : width, high > 3 ? high - (high < height ? 0.6 : 0) : high);
    if (width > 70 && high >= BAR) {
      pen.save();
      pen.beginPath(); pen.rect(area.left + start, top, width - 4, height); pen.clip();
      pen.fillStyle = inkOn(paint.works[graph.work[op]]);
      pen.textAlign = "left"; pen.font = paint.font.replace("12px", "11px");
      pen.fillText(opText(op), area.left + start + 5, top + height / 2 + 0.5);
      pen.restore();
    }
  }
}

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return red * 0.3 + green * 0.59 + blue * 0.11 > 130 ? "#111" : "#fff";
}

function outline(pen, area, view, op, colour) {
  const row = view.rows[graph.lane[op]], x = area.x(view.step.from[op]), end = area.x(view.step.to[op]);
  if (end < area.left || x > area.right) return;
  pen.strokeStyle = colour; pen.lineWidth = 2;
  const [top, height] = place(view.step, op, row.top, BAR);
  pen.strokeRect(Math.max(x, area.left - 4) - 1, top - 1, Math.min(Math.max(end - x, 1), area.width + 8) + 2, height + 2);
}

function timelineView(canvas, step) {
  const view = { canvas, step, rows: [], lane: 0 };
  const extra = (lane) => (lane === data.compute ? STRIP + 2 : 0);
  view.height = (width) => {
    let top = 4;
    const words = width >= WIDE ? 0 : WORDS;
    view.rows = data.lanes.map((_, lane) => {
      const row = { top: top + words };
      top += words + BAR + extra(lane) + GAP;
      return row;
    });
    return top + AXIS;
  };
  view.draw = (pen, area) => {
    const bottom = area.height - AXIS;
    drawAxis(pen, area, 0, bottom);
    view.rows.forEach((row, lane) => {
      pen.fillStyle = paint.lane;
      pen.fillRect(area.left, row.top, area.width, BAR);
      const share = `${Math.round((100 * step.busy[lane]) / (step.seconds || 1))}%`;
      pen.fillStyle = paint.ink; pen.textAlign = "left";
      if (area.narrow) pen.fillText(`${data.lanes[lane]}  ${share}`, 0, row.top - WORDS / 2);
      else {
        pen.fillText(data.lanes[lane], 0, row.top + BAR / 2);
        pen.fillStyle = paint.faint; pen.textAlign = "right";
        pen.fillText(share, area.left - 12, row.top + BAR / 2);
        if (lane === data.compute) {
          pen.font = paint.font.replace("12px", "10px");
          pen.fillText("waits for", area.left - 12, row.top + BAR + 2 + STRIP / 2);
          pen.font = paint.font;
        }
      }
    });
    pen.beginPath(); pen.rect(area.left, 0, area.width, bottom); pen.clip();
    view.rows.forEach((row, lane) => drawLane(pen, area, step, lane, row.top, BAR));
    drawStalls(pen, area, step, view.rows[data.compute].top + BAR + 2);
    if (step.seconds < to) {
      pen.fillStyle = paint.ink;
      pen.fillRect(Math.round(area.x(step.seconds)), 0, 1, bottom);
    }
    drawCursor(pen, area, 0, bottom);
    const shown = kept >= 0 ? kept : hovered;
    if (shown >= 0) {
      drawWaits(pen, area, view, shown);
      outline(pen, area, view, shown, paint.ink);
    }
    if (hovered >= 0 && hovered !== shown) outline(pen, area, view, hovered, paint.focus);
  };
  view.at = (x, y) => {
    const area = view.area, lane = view.rows.findIndex((row, at) => y >= row.top - 2 && y < row.top + BAR + extra(at) + 2);
    if (lane < 0 || x < area.left) return null;
    const time = area.time(x), near = (to - from) / area.width;
    const slot = Math.floor(((y - view.rows[lane].top) / BAR) * step.slots[lane]);
    const within = opAt(step, lane, time, near, slot), op = within >= 0 ? within : opAt(step, lane, time, near);
    if (op >= 0 && y < view.rows[lane].top + BAR + 1) return { op };
    if (lane === data.compute) {
      const stall = stallAt(step, time, near);
      if (stall >= 0) return { stall };
    }
    return null;
  };
  view.tell = (found) => (found.op !== undefined ? tellOp(step, found.op) : tellStall(step, found.stall));
  return view;
}

function opAt(step, lane, time, near, slot = -1) {
  const order = step.lanes[lane];
  let best = -1, far = near * 2;
  for (let i = firstAt(order, step.from, time - step.longest[lane] - far); i < order.length; i++) {
    const op = order[i];
    if (step.from[op] > time + far) break;
    if (slot >= 0 && step.slot[op] !== slot) continue;
    const away = time < step.from[op] ? step.from[op] - time : time > step.to[op] ? time - step.to[op] : 0;
    if (away < far || (away === 0 && far === 0)) { best = op; far = away; if (away === 0) break; }
  }
  return best;
}

function stallAt(step, time, near) {
  const { from: starts, to: ends } = step.stalls;
  for (let i = Math.max(firstAt(null, starts, time) - 2, 0); i < starts.length && starts[i] <= time + near; i++) {
    if (ends[i] >= time - near) return i;
  }
  return -1;
}

// Under compute, what it waits for, in the colour of that work: as high as the share of the time.
function drawStalls(pen, area, step, top) {
  const { from: starts, to: ends, cause } = step.stalls, scale = area.width / (to - from);
  const pixels = Math.ceil(area.width), filled = new Float32Array(pixels);
  for (let i = Math.max(firstAt(null, starts, from) - 1, 0); i < starts.length && starts[i] < to; i++) {
    const start = Math.max((starts[i] - from) * scale, 0), end = Math.min((ends[i] - from) * scale, pixels);
    pen.fillStyle = cause[i] === count ? paint.faint : paint.works[graph.work[cause[i]]];
    const first = Math.floor(start), last = Math.ceil(end);
    if (last - first > 3) { pen.fillRect(area.left + start, top, end - start, STRIP); continue; }
    for (let pixel = first; pixel < last; pixel++) {
      const share = Math.min(end, pixel + 1) - Math.max(start, pixel), below = filled[pixel];
      filled[pixel] += share;
      pen.fillRect(area.left + pixel, top + STRIP * (1 - Math.min(below + share, 1)), 1, STRIP * share);
    }
  }
}

function drawWaits(pen, area, view, op) {
  const step = view.step, last = lastWait(step, op);
  const middle = (each) => {
    const [top, height] = place(step, each, view.rows[graph.lane[each]].top, BAR);
    return top + height / 2;
  };
  pen.lineWidth = 1;
  for (let i = waitAt[op]; i < waitAt[op + 1]; i++) {
    const wait = op - graph.back[i];
    pen.globalAlpha = wait === last ? 1 : 0.35;
    pen.strokeStyle = wait === last ? paint.ink : paint.faint;
    const x = area.x(step.to[wait]), y = middle(wait), x2 = area.x(step.from[op]), y2 = middle(op);
    pen.beginPath(); pen.moveTo(x, y); pen.bezierCurveTo(x + 12, y, x2 - 12, y2, x2, y2); pen.stroke();
    if (wait === last) outline(pen, area, view, wait, paint.faint);
  }
  pen.globalAlpha = 1;
}

// Memory: at each pixel the fullest moment in it, stacked by role.

let memoryStep = steps[0];
function memoryView(canvas, tier) {
  const view = { canvas };
  const limits = data.tiers[tier];
  view.height = () => 190;
  view.draw = (pen, area) => {
    const memory = memoryStep.memory[tier], bottom = area.height - AXIS, high = 10;
    const top = Math.max(limits.peak, memory.arena, 1), inside = limits.budget <= 1.6 * top;
    const ceiling = 1.06 * Math.max(top, inside ? limits.budget : 0);
    const y = (bytes) => bottom - (bytes / ceiling) * (bottom - high);
    drawAxis(pen, area, 0, bottom);
    const unit = 2 ** (10 * Math.min(Math.floor(Math.log2(ceiling) / 10), 4)), power = 10 ** Math.floor(Math.log10(ceiling / unit / 3));
    const step = [1, 2, 5, 10].map((value) => value * power).find((value) => ceiling / unit / value <= 4.5) * unit;
    for (let bytes = 0; bytes <= ceiling; bytes += step) {
      pen.fillStyle = paint.grid;
      pen.fillRect(area.left, Math.round(y(bytes)), area.width, 1);
    }
    pen.save();
    pen.beginPath(); pen.rect(area.left, 0, area.width, bottom); pen.clip();
    drawStack(pen, area, memory, y, Math.min(memoryStep.seconds, to));
    if (limits.peak > memory.arena) hatch(pen, area, y(limits.peak), y(memory.arena));
    pen.fillStyle = paint.ink;
    pen.fillRect(area.left, Math.round(y(memory.arena)) - 1, area.width, 1.5);
    if (inside) {
      pen.strokeStyle = paint.budget; pen.lineWidth = 1.5; pen.setLineDash([7, 4]);
      pen.beginPath(); pen.moveTo(area.left, y(limits.budget)); pen.lineTo(area.right, y(limits.budget)); pen.stroke();
      pen.setLineDash([]);
    }
    drawCursor(pen, area, 0, bottom);
    pen.restore();
    pen.textAlign = area.narrow ? "left" : "right";
    for (let bytes = area.narrow ? step : 0; bytes <= ceiling; bytes += step) {
      const words = bytesText(bytes), x = area.narrow ? 3 : area.left - 8;
      if (area.narrow) { pen.fillStyle = paint.plot; pen.globalAlpha = 0.8; pen.fillRect(0, y(bytes) - 7, pen.measureText(words).width + 6, 14); pen.globalAlpha = 1; }
      pen.fillStyle = paint.faint;
      pen.fillText(words, x, y(bytes));
    }
  };
  view.at = (x) => (x < view.area.left ? null : { time: view.area.time(x) });
  view.tell = ({ time }) => {
    const memory = memoryStep.memory[tier], at = Math.min(Math.max(firstAt(null, memory.time, time) - 1, 0), memory.total.length - 1);
    if (at < 0 || time > memoryStep.seconds) return "";
    const lines = memory.roles.filter((role) => role.bytes[at]).map((role) => `${bytesText(role.bytes[at])}  ${role.name}`);
    return [`${tier} at ${momentText(time, to - from)}: ${bytesText(memory.total[at])} alive`, ...lines.reverse()].join("\n");
  };
  const legend = canvas.parentElement.querySelector(".legend");
  view.legend = () => {
    const memory = memoryStep.memory[tier];
    const entries = [...memory.roles].reverse().map((role) => [role.colour, role.name]);
    legend.replaceChildren(...entries.map(([colour, words]) => legendEntry(colour, words)));
    const more = [["ink", "reserved"], ...(limits.peak > memory.arena ? [["hatch", "for compute itself, at most"]] : [])];
    if (limits.budget <= 1.6 * Math.max(limits.peak, memory.arena, 1)) more.push(["budget", "budget"]);
    for (const [kind, words] of more) legend.append(legendEntry(kind, words));
  };
  view.legend();
  return view;
}

function drawStack(pen, area, memory, y, end) {
  const pixels = Math.max(Math.ceil(area.x(end) - area.left), 0), time = memory.time;
  if (!memory.total.length) return;
  const moments = new Uint32Array(pixels);
  let at = Math.max(firstAt(null, time, from) - 1, 0);
  for (let pixel = 0; pixel < pixels; pixel++) {
    const until = area.time(area.left + pixel + 1);
    let best = at;
    while (at + 1 < memory.total.length && time[at + 1] < until) { at++; if (memory.total[at] > memory.total[best]) best = at; }
    moments[pixel] = best;
  }
  // From the top of the stack down, each role from the ground: so no seam shows between two.
  const sum = Float64Array.from(moments, (moment) => memory.total[moment]);
  for (const role of [...memory.roles].reverse()) {
    pen.fillStyle = paint.of(role.colour);
    for (let pixel = 0, began = 0; pixel < pixels; pixel++) {  // a run of one height is one box
      if (pixel + 1 < pixels && sum[pixel + 1] === sum[began]) continue;
      pen.fillRect(area.left + began, y(sum[began]), pixel + 1 - began, y(0) - y(sum[began]));
      began = pixel + 1;
    }
    for (let pixel = 0; pixel < pixels; pixel++) sum[pixel] -= role.bytes[moments[pixel]];
  }
}

function hatch(pen, area, top, bottom) {
  pen.save();
  pen.beginPath(); pen.rect(area.left, top, area.width, bottom - top); pen.clip();
  pen.strokeStyle = paint.faint; pen.globalAlpha = 0.5; pen.lineWidth = 1;
  pen.beginPath();
  for (let x = area.left - (bottom - top); x < area.right; x += 7) { pen.moveTo(x, bottom); pen.lineTo(x + bottom - top, top); }
  pen.stroke();
  pen.restore();
}

// How far behind: of each compute op, the measured end less the predicted one, where it was measured.

function lagView(canvas, measured, predicted) {
  const view = { canvas };
  const order = [...measured.lanes[data.compute]].sort((a, b) => measured.to[a] - measured.to[b]);
  const at = Float64Array.from(order, (op) => measured.to[op]), lag = Float64Array.from(order, (op) => measured.to[op] - predicted.to[op]);
  const most = Math.max(0, ...lag), fewest = Math.min(0, ...lag), room = (most - fewest || 1e-9) * 1.1;
  view.height = () => 120;
  view.draw = (pen, area) => {
    const bottom = area.height - AXIS, high = 8;
    const y = (value) => bottom - 2 - ((value - fewest) / room) * (bottom - high - 2);
    drawAxis(pen, area, 0, bottom);
    pen.fillStyle = paint.faint;
    pen.fillRect(area.left, Math.round(y(0)), area.width, 1);
    pen.textAlign = area.narrow ? "left" : "right";
    for (const value of new Set([most, 0, fewest])) {
      const words = value === 0 ? "as predicted" : `${secondsText(Math.abs(value))} ${value > 0 ? "behind" : "ahead"}`;
      if (value === 0 || Math.abs(y(value) - y(0)) > 14) pen.fillText(words, area.narrow ? 3 : area.left - 8, y(value) - (area.narrow ? 8 : 0));
    }
    pen.beginPath(); pen.rect(area.left, 0, area.width, bottom); pen.clip();
    pen.strokeStyle = paint.ink; pen.lineWidth = 1.5;
    pen.beginPath();
    const first = Math.max(firstAt(null, at, from) - 1, 0);
    for (let i = first; i < at.length && (i === first || at[i - 1] <= to); i++) pen.lineTo(area.x(at[i]), y(lag[i]));
    pen.stroke();
    drawCursor(pen, area, 0, bottom);
  };
  view.at = (x) => (x < view.area.left ? null : { time: view.area.time(x) });
  view.tell = ({ time }) => {
    const i = Math.min(firstAt(null, at, time), at.length - 1);
    return i < 0 ? "" : `${secondsText(Math.abs(lag[i]))} ${lag[i] < 0 ? "ahead of" : "behind"} its prediction\n${opText(order[i])} ends at ${momentText(at[i], to - from)}`;
  };
  return view;
}

function overviewView(canvas) {
  const view = { canvas, height: () => 26, at: () => null, tell: () => "" };
  view.draw = (pen, area) => {
    const [start, end] = [from, to];
    [from, to] = [0, whole];
    drawLane(pen, area, steps[0], data.compute, 2, 22);
    [from, to] = [start, end];
    const left = area.left + (start / whole) * area.width, right = area.left + (end / whole) * area.width;
    pen.fillStyle = paint.plot; pen.globalAlpha = 0.72;
    pen.fillRect(area.left, 0, left - area.left, 26); pen.fillRect(right, 0, area.right - right, 26);
    pen.globalAlpha = 1;
    pen.strokeStyle = paint.ink; pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, 0.5, Math.max(right - left - 1, 2), 25);
    if (!area.narrow) { pen.fillStyle = paint.faint; pen.textAlign = "left"; pen.fillText("overview", 0, 13); }
  };
  view.whole = true;
  return view;
}

function legendEntry(colour, words) {
  const entry = document.createElement("li");
  const picture = document.getElementById("swatch").content.firstElementChild.cloneNode(true);
  picture.firstElementChild.setAttribute("class", colour);
  entry.append(picture, words);
  return entry;
}
