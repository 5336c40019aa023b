// What a person does with the drawings: pointer, wheel, touch and keys; and the start of it all. Text is set as text.

const tip = document.createElement("div");
tip.className = "tip"; tip.hidden = true;
document.body.append(tip);
const told = document.getElementById("told");

function showTip(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18}px`;
}

let scrolled = -1e9;
addEventListener("scroll", () => { scrolled = performance.now(); tip.hidden = true; }, { passive: true });

function listen(view) {
  const canvas = view.canvas, fingers = new Map();
  let dragged = 0, grip = null;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const timeAt = (x) => (view.whole ? ((x - view.area.left) / view.area.width) * whole : view.area.time(x));
  const hover = (event) => {
    const [x, y] = place(event), found = view.at(x, y);
    cursor = x >= view.area.left && !view.whole ? view.area.time(x) : null;
    hovered = found && found.op !== undefined ? found.op : -1;
    showTip(found ? view.tell(found) : "", event.clientX, event.clientY);
    refresh();
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, place(event)[0]);
    dragged = 0;
    grip = grips();
    if (view.whole) { const at = timeAt(place(event)[0]), half = (to - from) / 2; look(at - half, at + half); }
  });
  // What is under the fingers now: it stays under them as they move.
  const grips = () => [...fingers.values()].slice(0, 2).map(timeAt);
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) { hover(event); return; }
    const [x] = place(event);
    dragged += Math.abs(x - fingers.get(event.pointerId));
    fingers.set(event.pointerId, x);
    if (dragged < 4) return;
    tip.hidden = true;
    const xs = [...fingers.values()];
    if (view.whole) { const at = timeAt(x), half = (to - from) / 2; look(at - half, at + half); return; }
    const { left, width } = view.area;
    if (xs.length === 1) {
      const shift = grip[0] - view.area.time(xs[0]);
      look(from + shift, to + shift);
    } else if (Math.abs(xs[0] - xs[1]) > 8) {
      const span = Math.abs(((grip[1] - grip[0]) * width) / (xs[1] - xs[0]));
      look(grip[0] - ((xs[0] - left) / width) * span, grip[0] - ((xs[0] - left) / width) * span + span);
    }
    const wide = view.area;
    wide.time = (at) => from + ((at - wide.left) / wide.width) * (to - from);
  });
  const lift = (event) => {
    if (!fingers.delete(event.pointerId)) return;
    grip = grips();
    if (dragged < 4 && event.type === "pointerup" && view.step) {
      const [x, y] = place(event), found = view.at(x, y);
      kept = found && found.op !== undefined && found.op !== kept ? found.op : -1;
      view.lane = kept >= 0 ? graph.lane[kept] : view.lane;
      told.textContent = found ? view.tell(found) : "";
      refresh();
    }
  };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("pointerleave", () => { hovered = -1; cursor = null; tip.hidden = true; refresh(); });
  canvas.addEventListener("wheel", (event) => {
    // A page that scrolls under a still pointer goes on scrolling; and out of the whole step one scrolls on.
    if (performance.now() - scrolled < 200 && !event.ctrlKey) return;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const amount = (sideways ? event.deltaX || event.deltaY : event.deltaY) * [1, 16, 400][event.deltaMode];
    if (!sideways && amount > 0 && to - from >= whole) return;
    event.preventDefault();
    if (sideways) move(amount / view.area.width);
    else zoom(Math.exp(Math.max(-1, Math.min(1, amount * 0.0022))), view.whole ? (from + to) / 2 : timeAt(place(event)[0]));
    if (!view.whole) showTip("", 0, 0);
  }, { passive: false });
  canvas.addEventListener("dblclick", () => look(0, whole));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !press(view, event.key)) return;
    event.preventDefault();
  });
}

function press(view, key) {
  const acts = {
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => look(0, whole), Home: () => look(0, whole), Escape: () => { kept = -1; told.textContent = ""; refresh(); },
  };
  if (view.step) Object.assign(acts, { n: () => next(view, 1), p: () => next(view, -1), u: () => changeLane(view, -1), d: () => changeLane(view, 1) });
  if (!acts[key]) return false;
  acts[key]();
  return true;
}

function keep(view, op) {
  kept = op;
  told.textContent = tellOp(view.step, op);
  const { from: starts, to: ends } = view.step, width = to - from;
  if (starts[op] < from || ends[op] > to) look((starts[op] + ends[op] - width) / 2, (starts[op] + ends[op] + width) / 2);
  refresh();
}

function next(view, way) {
  const order = view.step.lanes[view.lane];
  if (!order.length) return;
  let at = kept >= 0 && graph.lane[kept] === view.lane ? order.indexOf(kept) + way : firstAt(order, view.step.from, from);
  keep(view, order[Math.max(0, Math.min(order.length - 1, at))]);
}

function changeLane(view, way) {
  const lanes = data.lanes.length;
  for (let i = 1; i <= lanes; i++) {
    const lane = (view.lane + way * i + lanes * i) % lanes, order = view.step.lanes[lane];
    if (!order.length) continue;
    const time = kept >= 0 ? view.step.from[kept] : from;
    view.lane = lane;
    keep(view, order[Math.min(firstAt(order, view.step.from, time), order.length - 1)]);
    return;
  }
}

// The page.

document.documentElement.classList.add("drawn");
for (const canvas of document.querySelectorAll("canvas[data-draw]")) {
  const kind = canvas.dataset.draw, name = canvas.dataset.of;
  const step = steps.find((one) => one.name === name);
  const view = kind === "timeline" ? timelineView(canvas, step) : kind === "memory" ? memoryView(canvas, name)
    : kind === "lag" ? lagView(canvas, steps[0], steps[1]) : overviewView(canvas);
  views.push(view);
  listen(view);
}
for (const button of document.querySelectorAll("button[data-do]")) {
  const acts = { all: () => look(0, whole), in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => move(-0.5), right: () => move(0.5) };
  button.addEventListener("click", acts[button.dataset.do]);
}
const choice = document.getElementById("memory-of");
if (choice) choice.addEventListener("change", () => {
  memoryStep = steps.find((step) => step.name === choice.value);
  for (const view of views) if (view.legend) view.legend();
  refresh();
});
document.getElementById("works").replaceChildren(...data.works.map((work) => legendEntry(work.colour, work.name)));

const restyle = () => { readStyle(); drawAll(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; restyle(); });
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; restyle(); });
new ResizeObserver(refresh).observe(document.body);
restyle();
