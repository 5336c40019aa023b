"use strict";
// What the drawings are of: the page's data decoded (data.py has the encoding), and its words. It draws nothing.

const data = JSON.parse(document.getElementById("data").textContent);

// What is packed.

function unpack(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const kinds = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  const values = packed.type === "v" ? leb128(bytes) : new kinds[packed.type](bytes.buffer);
  return packed.unit === 1 ? values : Float64Array.from(values, (value) => value * packed.unit);
}

function leb128(bytes) {
  const values = new Float64Array(bytes.reduce((sum, byte) => sum + (byte < 128 ? 1 : 0), 0));
  for (let i = 0, at = 0, scale = 1; i < bytes.length; i++) {
    values[at] += (bytes[i] & 127) * scale;
    scale = bytes[i] < 128 ? 1 : scale * 128;
    if (bytes[i] < 128) at++;
  }
  return values;
}

function sums(steps) {  // distances -> places
  const out = new Float64Array(steps.length);
  for (let i = 0, sum = 0; i < steps.length; i++) out[i] = sum += steps[i];
  return out;
}

function before(counts) {  // counts -> where each one's part begins, and the end
  const out = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) out[i + 1] = out[i] + counts[i];
  return out;
}

function spans(packed, tick) {
  const start = unpack(packed.start), length = unpack(packed.length), count = start.length;
  const from = new Float64Array(count), to = new Float64Array(count);
  for (let i = 0; i < count; i++) { from[i] = start[i] * tick; to[i] = (start[i] + length[i]) * tick; }
  return { from, to };
}

const graph = {};
for (const name of ["lane", "work", "stage", "template", "numbers", "amount", "waits", "back"]) {
  graph[name] = unpack(data.graph[name]);
}
const count = graph.lane.length;
const numberAt = before(Array.from(graph.template, (kind) => data.graph.templates[kind].length - 1));
const waitAt = before(graph.waits);

const steps = data.timelines.map((packed) => {
  const tick = packed.seconds / packed.ticks;
  const step = { name: packed.name, seconds: packed.seconds, ...spans(packed, tick), lanes: data.lanes.map(() => []) };
  for (let op = 0; op < count; op++) step.lanes[graph.lane[op]].push(op);
  for (const lane of step.lanes) lane.sort((a, b) => step.from[a] - step.from[b] || a - b);
  // The longest op of a lane says how far back one that is still running may have begun.
  step.longest = step.lanes.map((lane) => lane.reduce((most, op) => Math.max(most, step.to[op] - step.from[op]), 0));
  // Ops of a lane that are under way at once lie one above the other, each in the first slot where nothing else runs.
  step.slot = new Uint8Array(count);
  step.slots = step.lanes.map((lane) => {
    const ends = [];
    for (const op of lane) {
      const free = ends.findIndex((end) => end <= step.from[op] + step.seconds * 1e-9);
      step.slot[op] = free < 0 ? ends.length : free;
      ends[step.slot[op]] = step.to[op];
    }
    return Math.max(ends.length, 1);
  });
  step.busy = step.lanes.map((lane) => {
    let sum = 0, until = 0;
    for (const op of lane) if (step.to[op] > until) { sum += step.to[op] - Math.max(step.from[op], until); until = step.to[op]; }
    return sum;
  });
  step.stalls = { ...spans(packed.stalls, tick), waiting: unpack(packed.stalls.waiting), cause: unpack(packed.stalls.cause) };
  step.memory = {};
  for (const [tier, usage] of Object.entries(packed.memory)) step.memory[tier] = memoryOf(usage, tick);
  return step;
});
const whole = Math.max(...steps.map((step) => step.seconds)) || 1;

function memoryOf(usage, tick) {
  const time = sums(unpack(usage.time)).map((value) => value * tick), length = Math.max(time.length - 1, 0);
  const total = new Float64Array(length);
  const roles = usage.roles.map((role) => {
    const at = sums(unpack(role.at)), changes = unpack(role.bytes), bytes = new Float64Array(length);
    for (let i = 0; i < at.length; i++) bytes.fill(changes[i], at[i], i + 1 < at.length ? at[i + 1] : length);
    for (let i = 0; i < length; i++) total[i] += bytes[i];
    return { name: role.name, colour: role.colour, bytes };
  });
  return { arena: usage.arena, time, total, roles };
}

// Words, as text.py writes them.

function bytesText(value) {
  for (const [unit, scale] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (value >= scale) return `${value / scale >= 100 ? Math.round(value / scale) : digits(value / scale)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}
function digits(value) { return String(Number(value.toPrecision(3))); }
function secondsText(value) {
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} us`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  return value < 1000 ? `${digits(value)} s` : `${Math.round(value)} s`;
}
function momentText(value, window) {  // with as many digits as tell moments of the window apart
  const [scale, unit] = whole >= 1 ? [1, "s"] : whole >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  const places = Math.max(0, Math.min(9, Math.ceil(-Math.log10((window * scale) / 1000))));
  return `${(value * scale).toFixed(places)} ${unit}`;
}
function opText(op) {
  const pieces = data.graph.templates[graph.template[op]];
  let text = pieces[0];
  for (let i = 1; i < pieces.length; i++) text += graph.numbers[numberAt[op] + i - 1] + pieces[i];
  return text;
}
function workText(op) { return `${data.lanes[graph.lane[op]]}: ${data.works[graph.work[op]].name}`; }
function lastWait(step, op) {
  let last = -1;
  for (let i = waitAt[op]; i < waitAt[op + 1]; i++) {
    const wait = op - graph.back[i];
    if (last < 0 || step.to[wait] > step.to[last] || (step.to[wait] === step.to[last] && wait > last)) last = wait;
  }
  return last;
}
function tellOp(step, op) {
  const [size, unit] = data.graph.amounts[graph.amount[op]];
  const amount = unit === "bytes" ? `, ${bytesText(size)}` : unit ? `, ${size.toLocaleString("en")} ${unit}` : "";
  const lines = [opText(op), `${workText(op)}${amount}, stage ${graph.stage[op]}`];
  for (const one of steps) {
    const name = steps.length > 1 ? `${one.name}: ` : "";
    const length = one.to[op] - one.from[op];
    lines.push(`${name}${momentText(one.from[op], length)} to ${momentText(one.to[op], length)}, ${secondsText(length)}`);
  }
  const last = lastWait(step, op);
  if (last < 0) lines.push("waited for nothing");
  else {
    const idle = step.from[op] - step.to[last];
    const then = idle > whole * 1e-7 ? `, then ${secondsText(idle)} for its lane` : "";
    lines.push(`waited for ${opText(last)} (${data.lanes[graph.lane[last]]})${then}`);
  }
  return lines.join("\n");
}
function tellStall(step, index) {
  const { from, to, waiting, cause } = step.stalls, why = cause[index], who = waiting[index];
  const head = `compute waits ${secondsText(to[index] - from[index])}`;
  const reason = why === count ? `for ${data.starting}` : `for ${opText(why)}\n${workText(why)}`;
  return `${head}\n${reason}\nbefore ${who === count ? "the end of the step" : opText(who)}`;
}
