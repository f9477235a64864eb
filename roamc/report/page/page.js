"use strict";
// What the drawing cannot do by itself: the names under the pointer, and magnification.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const plots = [...document.querySelectorAll(".plot")];
  const word = (number) => data.texts[number];
  const count = (number) => number.toLocaleString("en-US");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const span = (plot) => Number(plot.dataset.span);
  const group = (plot) => plots.filter((other) => other.dataset.group === plot.dataset.group);

  // x of the start of every step, and of the end of the last, on both axes: as roamc.report.axis.
  const edges = {};
  for (const name of ["before", "after"]) {
    let end = 0;
    edges[`${name}-time`] = [0, ...data[name].time.map((width) => (end += width))];
    edges[`${name}-steps`] = [0, ...data[name].time.map((_, step) => step + 1)];
  }
  const starts = (plot) => edges[plot.dataset.group];

  // The step that runs at x: the last that starts there or before.
  function stepAt(plot, x) {
    const from = starts(plot);
    let low = 0, high = from.length - 2;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (from[middle] <= x) low = middle; else high = middle - 1;
    }
    return low;
  }

  // As roamc.units.format_bytes: decimal units, four significant digits.
  function bytes(size) {
    if (size < 1000) return `${size} B`;
    for (const [unit, factor] of [["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]]) {
      const value = Number((size / factor).toPrecision(4));
      if (value < 1000 || unit === "TB") return `${value} ${unit}`;
    }
  }

  // The window of a plot: x on its axis from first on, y in pixels of the drawing.
  function view(plot) {
    const [first, , width, height] = plot.getAttribute("viewBox").split(" ").map(Number);
    return { first, width, height };
  }

  // Where the pointer is, on the axis and in bytes, and how much of each one pixel of the screen covers.
  function place(plot, event) {
    const scale = plot.querySelector(".ground").getScreenCTM();
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(scale.inverse());
    const { height } = view(plot);
    const top = Number(plot.dataset.top);
    return {
      x: clamp(point.x, 0, span(plot) - 1e-6), at: top * (1 - point.y / height),
      perX: 1 / scale.a, perByte: top / height / scale.d,
    };
  }

  // Of the steps under one pixel the one with the most live bytes.
  function fullest(plot, live, x, width) {
    const last = stepAt(plot, Math.min(x + width / 2, span(plot)));
    let best = stepAt(plot, x);
    for (let step = stepAt(plot, Math.max(0, x - width / 2)); step <= last; step++) if (live[step] > live[best]) best = step;
    return best;
  }

  function aboutStep(order, step) {
    const [name, operator, phase, line, module] = order.work[step].map(word);
    return [
      `${bytes(order.live[step])} live at step ${count(step + 1)} of ${count(order.live.length)}`,
      `${bytes(data.held + order.live[step])} with what the caller holds`,
      `${name} (${operator}), ${phase.toLowerCase()}`, line, module,
    ];
  }

  // The storage under the pointer; else the nearest within two pixels, because small ones are thinner than that.
  function nearest(plot, boxes, { x, at, perX, perByte }) {
    let best = null, least = 2;
    for (const box of boxes) {
      const [, , , , , , size, born, dead, low] = box;
      const aside = Math.max(starts(plot)[born] - x, x - starts(plot)[dead], 0) / perX;
      const above = Math.max(low - at, at - low - size, 0) / perByte;
      const away = Math.max(aside, above);
      if (away < least || (away === 0 && best === null)) [best, least] = [box, away];
    }
    return best;
  }

  function aboutBox(plot, box) {
    const [name, kind, place, operator, line, module] = box.slice(0, 6).map(word);
    const [size, born, dead, low, tensors] = box.slice(6);
    const where = plot.dataset.name === "arena" ? `address ${count(low)} (${bytes(low)})` : `outside the arena: ${place}`;
    const shared = tensors.length > 1 ? `holds one after another: ${tensors.map(word).join(", ")}` : "";
    return [
      name, `${kind}, ${bytes(size)} (${count(size)} bytes)`, `steps ${count(born + 1)} to ${count(dead)}`, where,
      operator ? `made by ${operator}` : "handed in", line, module, shared,
    ];
  }

  function show(lines, event) {
    const title = document.createElement("b");
    title.textContent = lines[0];
    tip.replaceChildren(title, lines.slice(1).filter(Boolean).join("\n"));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = event.clientX + 16 + width < innerWidth ? event.clientX + 16 : event.clientX - width - 16;
    const under = event.clientY + 16 + height < innerHeight ? event.clientY + 16 : event.clientY - height - 16;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, under)}px`;
  }

  function outline(plot, path, name = "cursor") {
    const cursor = plot.querySelector(".cursor");
    cursor.setAttribute("d", path);
    cursor.setAttribute("class", name);
  }

  function hide() {
    tip.hidden = true;
    plots.forEach((plot) => outline(plot, ""));
  }

  function point(plot, event) {
    const spot = place(plot, event);
    const { height } = view(plot);
    const boxes = data.boxes[plot.dataset.name];
    if (!boxes) {
      const order = data[plot.dataset.name];
      const step = fullest(plot, order.live, spot.x, spot.perX);
      outline(plot, `M${(starts(plot)[step] + starts(plot)[step + 1]) / 2} 0v${height}`);
      return show(aboutStep(order, step), event);
    }
    const box = nearest(plot, boxes, spot);
    if (!box) return hide();
    const [size, born, dead, low] = box.slice(6);
    const top = Number(plot.dataset.top);
    const [left, right] = [starts(plot)[born], starts(plot)[dead]];
    outline(plot, `M${left} ${height * (1 - (low + size) / top)}H${right}V${height * (1 - low / top)}H${left}Z`);
    show(aboutBox(plot, box), event);
  }

  // Round numbers, as roamc.report.axis.
  function ticks(first, last) {
    const power = 10 ** Math.max(0, Math.floor(Math.log10((last - first) / 8)));
    const apart = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= (last - first) / 8) || 1;
    const found = [];
    for (let tick = Math.ceil(first / apart) * apart; tick <= last; tick += apart) if (tick) found.push(tick);
    return found;
  }

  function magnify(plot, first, last) {
    const height = view(plot).height;
    const root = plot.closest(".chart");
    const per = Number(plot.dataset.per), before = Number(plot.dataset.before);
    plot.setAttribute("viewBox", `${first} 0 ${last - first} ${height}`);
    root.classList.toggle("magnified", last - first < span(plot)); // the names stay where they were drawn
    const strip = root.querySelector(".ticks");
    strip.setAttribute("viewBox", `${first} 0 ${last - first} ${strip.getAttribute("viewBox").split(" ")[3]}`);
    const axis = root.querySelector(".axis.x");
    axis.replaceChildren(...ticks((first + before) / per, (last + before) / per).map((tick) => {
      const label = document.createElementNS(axis.namespaceURI, "text");
      label.setAttribute("x", `${(100 * (tick * per - before - first)) / (last - first)}%`);
      label.setAttribute("y", 10);
      label.textContent = count(tick);
      return label;
    }));
  }

  for (const plot of plots) {
    let start = null;
    const dragged = (event) => [start, place(plot, event).x].sort((a, b) => a - b);
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = place(plot, event).x;
      plot.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    plot.addEventListener("pointermove", (event) => {
      if (start === null) return point(plot, event);
      const [first, last] = dragged(event);
      hide();
      outline(plot, `M${first} 0H${last}V${view(plot).height}H${first}Z`, "cursor range");
    });
    plot.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [first, last] = dragged(event);
      start = null;
      hide();
      if ((last - first) / place(plot, event).perX < 6) return;
      const low = starts(plot)[stepAt(plot, first)];
      const high = starts(plot)[Math.min(starts(plot).length - 1, stepAt(plot, last) + 1)];
      group(plot).forEach((other) => magnify(other, low, high));
    });
    plot.addEventListener("dblclick", () => group(plot).forEach((other) => magnify(other, 0, span(other))));
    plot.addEventListener("pointercancel", () => { start = null; hide(); });
    plot.addEventListener("pointerleave", () => { if (start === null) hide(); });
  }
  for (const spot of document.querySelectorAll(".spot")) {
    const title = spot.querySelector("title");
    const lines = title.textContent.split("\n");
    title.remove(); // the browser's own note would lie over ours
    spot.setAttribute("aria-label", lines.join(", "));
    spot.addEventListener("pointermove", (event) => show(lines, event));
    spot.addEventListener("pointerleave", hide);
  }
  // Long names may go on in a new line behind a dot, a stroke or a colon, not in the middle of a word.
  for (const place of document.querySelectorAll(".name, h1")) {
    const parts = place.textContent.split(/(?<=[^\s][./:])(?=[^\W\d])/u);
    place.replaceChildren(...parts.flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
  }
  document.body.classList.add("live");
})();
