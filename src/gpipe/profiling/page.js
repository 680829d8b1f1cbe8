"use strict";
// Draws the timeline of a report on a canvas as wide as the page. The canvas is inside a strip whose width depends on
// the zoom, so that scrolling pans. steps_json (page.py) writes the data. Also shows values of the loss curve.

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

const most = (numbers, none = 0) => numbers.reduce((a, b) => Math.max(a, b), none); // for arrays of any length
const least = (numbers, none = Infinity) => numbers.reduce((a, b) => Math.min(a, b), none);

/** Formats a time with three digits and a suitable unit. */
function lasts(seconds) {
  const [size, unit] = seconds >= 0.9995 ? [1, "s"] : seconds >= 0.9995e-3 || !seconds ? [1e-3, "ms"] : [1e-6, "µs"];
  const value = seconds / size;
  return `${value ? value.toFixed(clamp(2 - Math.floor(Math.log10(Number(value.toPrecision(3)))), 0, 6)) : 0} ${unit}`;
}

/** Formats a time on an axis, with as many digits as needed to distinguish neighboring ticks. */
function tickLabel(seconds, step) {
  const [size, unit] = step >= 0.45 ? [1, "s"] : step >= 0.9e-4 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(seconds / size).toFixed(clamp(Math.ceil(-Math.log10(step / size) - 1e-9), 0, 6))} ${unit}`;
}

function timeline(data) {
  const AXIS = 22, BETWEEN = 8, BOX = 26, THIN = 4, PREDICTED = 9, DEEPEST = 2000;
  const view = byId("view"), strip = byId("strip"), canvas = byId("canvas"), tip = byId("tip"), names = byId("names");
  const pen = canvas.getContext("2d");
  const predicted = data.predicted && decoded(data.predicted);
  const predictedSpans = new Map((predicted ? predicted.lanes.flat() : []).map((span) => [key(span), span]));
  const box = byId("show-predicted");
  let step, above, zoom = 1, chosen = null, pointed = null, dragged = null;

  function decoded({ seconds, ranks, slices, number = 0, other = {} }) {
    const named = (m) => (slices > 1 ? `${Math.floor(m / slices)}.${m % slices}` : `${m}`);
    const lanes = ranks.map(({ actions }, rank) => {
      const spans = [];
      for (let at = 0, begun = 0; at < actions.length; at += 4) {
        begun += actions[at + 2];
        const start = (begun / data.parts) * seconds, end = ((begun + actions[at + 3]) / data.parts) * seconds;
        const [place, microBatch] = actions.slice(at, at + 2), label = named(microBatch);
        spans.push({ rank, place, microBatch, label, start, end, ...data.actions[place] });
      }
      return spans;
    });
    return { seconds, number, other, lanes, busy: ranks.map(({ busy }) => busy) };
  }

  function key(span) {
    return `${span.rank} ${span.place} ${span.microBatch}`;
  }

  // ---- what is shown, and its position ----

  const shown = () => Math.max(step.seconds, above ? above.seconds : 0);
  const laneHeight = () => (above ? PREDICTED + 2 : 0) + BOX + THIN + 2 + BETWEEN;
  const x = (seconds) => (seconds / shown()) * strip.clientWidth - view.scrollLeft;
  const timeAt = (px) => ((px + view.scrollLeft) / strip.clientWidth) * shown();

  function choose(next) {
    step = next;
    above = predicted && step !== predicted && (!box || box.checked) ? predicted : null;
    chosen = pointed = null;
    names.replaceChildren(...step.busy.map((busy, rank) => {
      const [name, title, note, word] = ["div", "b", "small", "span"].map((tag) => document.createElement(tag));
      title.textContent = `rank ${rank}`;
      word.textContent = " busy";
      note.append(`${Math.round(100 * busy)} %`, word);
      name.style.height = `${laneHeight()}px`;
      name.append(title, note);
      return name;
    }));
    const took = Object.entries(step.other).filter(([, seconds]) => seconds);
    const outside = took.map(([name, seconds]) => `${name} ${lasts(seconds)}`).join(", ");
    byId("outside").textContent = outside && `Outside the pipeline, on all ranks: ${outside}.`;
    describe(null);
  }

  /** Zooms around a position of the view. Default: the chosen action, or the middle. */
  function zoomTo(factor, anchor = middleOf(chosen)) {
    const share = (view.scrollLeft + anchor) / strip.clientWidth;
    zoom = clamp(zoom * factor, 1, DEEPEST);
    strip.style.width = `${100 * zoom}%`;
    view.scrollLeft = share * strip.clientWidth - anchor;
    draw();
  }

  function middleOf(span) {
    const middle = span ? (x(span.start) + x(span.end)) / 2 : -1;
    return middle >= 0 && middle <= view.clientWidth ? middle : view.clientWidth / 2;
  }

  function zoomBetween(from, to) {
    const middle = (from + to) / 2 / shown();
    zoom = clamp(shown() / (to - from), 1, DEEPEST);
    strip.style.width = `${100 * zoom}%`;
    view.scrollLeft = middle * strip.clientWidth - view.clientWidth / 2;
    draw();
  }

  // ---- drawing ----

  function draw() {
    const width = view.clientWidth, height = step.lanes.length * laneHeight() + AXIS;
    const dots = window.devicePixelRatio || 1;
    canvas.style.width = `${width}px`;
    canvas.style.height = strip.style.height = `${height}px`;
    canvas.width = width * dots;
    canvas.height = height * dots;
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = "11px system-ui, sans-serif";
    const css = getComputedStyle(document.documentElement), color = (name) => css.getPropertyValue(name).trim();
    const followed = (pointed || chosen || {}).microBatch ?? -1;
    const longest = most(step.lanes.flat().map((span) => span.label.length));
    drawAxis(height, color);
    step.lanes.forEach((lane, rank) => {
      const top = rank * laneHeight(), main = top + (above ? PREDICTED + 2 : 0);
      pen.fillStyle = color("--idle");
      pen.fillRect(x(0), main, x(step.seconds) - x(0), BOX);
      const ahead = above ? (above.lanes[rank] || []).filter((span) => !span.thin) : [];
      for (const span of ahead) paint(span, top, PREDICTED, followed, Infinity);
      for (const span of lane) paint(span, ...rows(span), followed, longest);
    });
    for (const span of [chosen, pointed]) if (span && !span.idle) outline(span, color("--ink"));
    if (dragged && dragged.to !== dragged.from) {
      pen.fillStyle = "#2f6db555";
      pen.fillRect(Math.min(dragged.from, dragged.to), 0, Math.abs(dragged.to - dragged.from), height - AXIS);
    }
    const from = timeAt(0), to = timeAt(width), whole = step === predicted ? "predicted" : `step ${step.number}`;
    byId("range").textContent =
      `${whole}: ${lasts(step.seconds)}` + (zoom > 1 ? `, showing ${lasts(from)} to ${lasts(to)}` : "");
    placeTip(pointed || chosen);
  }

  /** Paints a box, and the number of its micro-batch if there is room for this many digits. */
  function paint(span, top, height, followed, digits) {
    const left = x(span.start), wide = x(span.end) - left;
    if (left > view.clientWidth || left + wide < 0) return;
    pen.globalAlpha = (followed < 0 || span.microBatch === followed ? 1 : 0.22) * (digits < Infinity ? 1 : 0.65);
    pen.fillStyle = span.color;
    pen.fillRect(left, top, Math.max(wide > 3 ? wide - 0.7 : wide, 0.5), height);
    if (span.microBatch >= 0 && !span.thin && wide >= 7 * digits + 3) {
      pen.fillStyle = span.dark ? "#1f2328" : "#ffffff";
      const seen = (Math.max(left, 0) + Math.min(left + wide, view.clientWidth)) / 2;
      pen.fillText(span.label, wide > view.clientWidth ? seen : left + wide / 2, top + height / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }

  function outline(span, color) {
    const [top, height] = rows(span);
    pen.strokeStyle = color;
    pen.lineWidth = 2;
    pen.strokeRect(x(span.start) - 0.5, top - 0.5, Math.max(x(span.end) - x(span.start), 1), height + 1);
  }

  function rows(span) {
    const top = span.rank * laneHeight(), main = top + (above ? PREDICTED + 2 : 0);
    if (above && predictedSpans.get(key(span)) === span) return [top, PREDICTED];
    return span.thin ? [main + BOX + 1, THIN] : [main, BOX];
  }

  /** Draws lines at round times, below everything else. */
  function drawAxis(height, color) {
    const apart = (80 / strip.clientWidth) * shown(), decade = 10 ** Math.floor(Math.log10(apart));
    const tick = decade * [1, 2, 5, 10].find((factor) => factor * decade >= apart);
    for (let at = Math.ceil(timeAt(0) / tick - 1e-9) * tick; at <= timeAt(view.clientWidth) + tick / 1e6; at += tick) {
      pen.fillStyle = color("--soft");
      pen.globalAlpha = 0.25;
      pen.fillRect(x(at), 0, 1, height - AXIS);
      pen.globalAlpha = 1;
      const label = tickLabel(at, tick), half = pen.measureText(label).width / 2;
      pen.fillText(label, clamp(x(at), half, view.clientWidth - half), height - AXIS / 2);
    }
  }

  // ---- the action under the pointer ----

  function spanAt(px, py) {
    const rank = Math.floor(py / laneHeight()), within = py - rank * laneHeight();
    if (rank < 0 || rank >= step.lanes.length) return null;
    const upper = above ? PREDICTED + 2 : 0, time = timeAt(px), near = timeAt(px + 2) - time;
    if (within < upper) return holding(above.lanes[rank] || [], time, 0, false);
    const thin = within > upper + BOX;
    const found = holding(step.lanes[rank], time, near, thin);
    if (found || thin || time > step.seconds) return found;
    const boxes = step.lanes[rank].filter((span) => !span.thin);
    const start = most(boxes.map((span) => (span.end <= time ? span.end : 0)));
    const end = least(boxes.map((span) => (span.start >= time ? span.start : step.seconds)), step.seconds);
    return { rank, start, end, idle: true, name: "idle" };
  }

  function holding(spans, time, near, thin) {
    const could = spans.filter((span) => span.thin === thin && span.start - near <= time && time <= span.end + near);
    return could.find((span) => span.start <= time && time < span.end) || could[0] || null;
  }

  function describe(span) {
    tip.textContent = ""; // Never hidden: screen readers only announce changes of an element that is already there.
    if (span) {
      const ahead = !span.idle && predictedSpans.get(key(span));
      const which = span.idle || span.microBatch < 0 ? "" : `, micro-batch ${span.label}`;
      const where = `, ${span.idle ? "" : `stage ${span.stage}, `}rank ${span.rank}`;
      const way = span.route ? `\nroute ${span.route}` : "";
      const times = (one) => `${lasts(one.end - one.start)}, from ${lasts(one.start)}`;
      tip.textContent =
        (ahead === span && above ? "predicted " : "") + span.name + which + where + way + "\n" + times(span) +
        (ahead && ahead !== span ? `\npredicted ${times(ahead)}` : "");
    }
    draw();
  }

  function placeTip(span) {
    if (!span) return;
    const [top, height] = rows(span), room = view.parentElement.clientWidth - tip.offsetWidth;
    tip.style.left = `${clamp(view.offsetLeft + x(span.start) + 4, 0, Math.max(room, 0))}px`;
    tip.style.top = `${top + height + 6}px`;
  }

  function point(event) {
    const at = canvas.getBoundingClientRect();
    pointed = spanAt(event.clientX - at.left, event.clientY - at.top);
    describe(pointed || chosen);
  }

  function go(key) {
    const ranks = step.lanes.length, lane = chosen ? step.lanes[chosen.rank] : [];
    const first = step.lanes.find((spans) => spans.length);
    if (!first) return;
    const along = { ArrowLeft: -1, ArrowRight: 1 }[key], across = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (!chosen) chosen = first[0];
    else if (along) chosen = lane[clamp(lane.indexOf(chosen) + along, 0, lane.length - 1)];
    else if (across) {
      const other = step.lanes[clamp(chosen.rank + across, 0, ranks - 1)];
      const far = (span) => Math.abs(span.start - chosen.start) + (span.thin ? shown() : 0);
      chosen = other.reduce((best, span) => (far(span) < far(best) ? span : best), other[0]) || chosen;
    } else chosen = lane[key === "Home" ? 0 : lane.length - 1];
    const middle = (x(chosen.start) + x(chosen.end)) / 2;
    if (middle < 0 || middle > view.clientWidth) view.scrollLeft += middle - view.clientWidth / 2;
    pointed = null;
    describe(chosen);
  }

  // ---- events ----

  const closer = () => zoomTo(1.6), farther = () => zoomTo(1 / 1.6), whole = () => zoomTo(1 / zoom);
  const keys = { "+": closer, "=": closer, "-": farther, 0: whole };
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) keys[event.key]();
    else if (/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) go(event.key);
    else if (event.key === "Escape") describe((chosen = pointed = null));
    else return;
    event.preventDefault();
  });
  byId("in").addEventListener("click", closer);
  byId("out").addEventListener("click", farther);
  byId("whole").addEventListener("click", whole);
  view.addEventListener("scroll", () => requestAnimationFrame(draw));
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // Otherwise the page scrolls as usual.
    event.preventDefault();
    zoomTo(Math.exp(-event.deltaY / 200), event.clientX - view.getBoundingClientRect().left);
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button) return;
    dragged = { from: event.offsetX, to: event.offsetX };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) dragged.to = clamp(event.offsetX, 0, view.clientWidth);
    point(event);
  });
  canvas.addEventListener("pointerup", (event) => {
    const { from, to } = dragged || { from: 0, to: 0 };
    dragged = null;
    if (Math.abs(to - from) > 5) return zoomBetween(timeAt(Math.min(from, to)), timeAt(Math.max(from, to)));
    point(event);
    describe((chosen = pointed && pointed.idle ? null : pointed) || pointed);
  });
  canvas.addEventListener("pointerleave", () => describe((pointed = null) || chosen));

  let apart = 0; // the distance of two fingers
  const fingers = ({ touches: [one, other] }) => Math.max(Math.abs(one.clientX - other.clientX), 1);
  view.addEventListener("touchstart", (event) => { apart = event.touches.length === 2 ? fingers(event) : 0; });
  view.addEventListener("touchmove", (event) => {
    if (event.touches.length !== 2 || !apart) return;
    event.preventDefault();
    const middle = (event.touches[0].clientX + event.touches[1].clientX) / 2;
    zoomTo(fingers(event) / apart, middle - view.getBoundingClientRect().left);
    apart = fingers(event);
  }, { passive: false });

  const steps = new Map(data.steps.map((one) => [one.number, one]));
  for (const input of document.querySelectorAll("input[name=step]")) {
    input.addEventListener("change", () => choose(decoded(steps.get(Number(input.value)))));
  }
  if (box) box.addEventListener("change", () => choose(step));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const checked = document.querySelector("input[name=step]:checked");
  choose(checked ? decoded(steps.get(Number(checked.value))) : data.steps.length ? decoded(data.steps[0]) : predicted);
  new ResizeObserver(draw).observe(view);
}

/** Shows the loss at the pointer, or the one chosen with the arrow keys. */
function curve(figure) {
  const losses = figure.dataset.losses.split(" ").map(Number);
  const finite = losses.filter(Number.isFinite), low = least(finite), high = most(finite, -Infinity);
  const picture = figure.querySelector("svg"), [read, dot] = [0, 1].map(() => document.createElement("span"));
  let at = losses.length - 1;
  read.className = "read";
  read.setAttribute("role", "status");
  dot.className = "dot";
  figure.tabIndex = 0;

  function say(next) {
    at = clamp(next, 0, losses.length - 1);
    figure.append(read, dot);
    const said = Number.isFinite(losses[at]) ? losses[at] : "not finite";
    read.textContent = `${figure.dataset.each} ${at + 1}: ${said}`;
    const area = picture.getBoundingClientRect(), whole = figure.getBoundingClientRect();
    const across = losses.length > 1 ? at / (losses.length - 1) : 0;
    const down = high > low ? (high - losses[at]) / (high - low) : 0.5;
    dot.hidden = !Number.isFinite(losses[at]);
    dot.style.left = `${area.left - whole.left + across * area.width}px`;
    dot.style.top = `${area.top - whole.top + (down || 0) * area.height}px`;
  }

  picture.addEventListener("pointermove", (event) => {
    const area = picture.getBoundingClientRect();
    say(Math.round(((event.clientX - area.left) / area.width) * (losses.length - 1)));
  });
  figure.addEventListener("keydown", ({ key }) => {
    if (key === "ArrowLeft" || key === "ArrowRight") say(at + (key === "ArrowLeft" ? -1 : 1));
  });
}

if (byId("data")) timeline(JSON.parse(byId("data").textContent));
document.querySelectorAll(".curve").forEach(curve);
