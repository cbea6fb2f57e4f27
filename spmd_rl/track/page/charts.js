// Charts as SVG, as wide as their column: lines over steps, stacked bars, and the phases of ranks on a timeline.

const MANY_POINTS = 60;

function ticks(low, high, count, whole) {
  // about `count` round values; only integers if `whole`
  let step = (high - low) / Math.max(count, 1);
  const size = 10 ** Math.floor(Math.log10(step));
  step = [1, 2, 2.5, 5, 10].map((nice) => size * nice).find((nice) => nice >= step * 0.85);
  if (whole) step = Math.max(1, Math.ceil(step));
  const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function label(value, digits = 3) {
  const size = Math.abs(value);
  if (size >= 1e4) return size < 1e6 ? `${Number((value / 1e3).toPrecision(digits))}k` : `${Number((value / 1e6).toPrecision(digits))}M`;
  return number(size < 1000 || digits > 3 ? value : Math.round(value), digits);
}

function labels(values) {
  // as short as possible, with enough digits to keep them distinct
  for (let digits = 3; ; digits += 1) {
    const words = values.map((value) => label(value, digits));
    if (new Set(words).size === words.length || digits > 11) return words;
  }
}

function padded(values) {
  // the range of an axis: [0, 1] for shares, else from 0 or with a margin on both sides
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (low >= 0 && high <= 1 && high > 0.3) return [0, 1];
  if (low >= 0 && low < 0.85 * high) return [0, high * 1.08];
  const margin = (high - low) * 0.12 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

function smooth(points) {
  // the centred moving mean over a twenty-fifth of the series
  const reach = Math.max(1, Math.floor(points.length / 50));
  return points.map(([step], index) => [step, mean(points.slice(Math.max(0, index - reach), index + reach + 1).map((point) => point[1]))]);
}

function frame(width, height, [left, right], [low, high]) {
  // the plot area, its scales, and its grid with numbers
  const words = labels(ticks(low, high, 4));
  const margin = { left: Math.max(40, 14 + 6.6 * Math.max(...words.map((word) => word.length))), right: 14, top: 10, bottom: 24 };
  const x = (value) => margin.left + ((value - left) / (right - left)) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - ((value - low) / (high - low)) * (height - margin.top - margin.bottom);
  const edges = { x1: margin.left, x2: width - margin.right };
  const grid = ticks(low, high, 4).flatMap((value, index) => [
    svg("line", { class: "grid", ...edges, y1: y(value), y2: y(value) }),
    caption(margin.left - 8, y(value) + 3.5, words[index], "end")]);
  grid.push(svg("line", { class: "axis", ...edges, y1: height - margin.bottom, y2: height - margin.bottom }));
  return { x, y, grid, left: margin.left, right: width - margin.right, top: margin.top, floor: height - margin.bottom };
}

function caption(x, y, text, anchor = "middle") {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

function stepAxis(area, values) {
  // the numbers of a horizontal axis of steps; `values`: [position, step]
  return [caption(area.left - 8, area.floor + 17, "step", "end"),
    ...values.map(([x, step]) => caption(x, area.floor + 17, label(step)))];
}

function fitted(height, draw) {
  // a drawing that is made again when its column changes its width
  const box = h("div", { className: "fitted" });
  let drawn = 0;
  box.style.minHeight = `${height}px`;
  const fit = () => {
    if (box.clientWidth > 60 && box.clientWidth !== drawn) {
      drawn = box.clientWidth;
      box.replaceChildren(...draw(drawn));
    }
  };
  new ResizeObserver(fit).observe(box);
  // a window that paints nothing has no observer: a page that is printed or dumped
  setTimeout(fit);
  return box;
}

function canvas(width, height, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" }, ...children.flat());
}

function hover(drawn, area, places, read, pick) {
  // a line at the nearest of `places` under the pointer, and a note with what `read(index)` returns
  const nearest = (event) => {
    const x = event.clientX - drawn.getBoundingClientRect().left;
    return places.reduce((best, place, index) => (Math.abs(place - x) < Math.abs(places[best] - x) ? index : best), 0);
  };
  const line = svg("line", { class: "pointer", y1: area.top, y2: area.floor, x1: 0, x2: 0 });
  const note = h("div", { className: "tip" });
  drawn.append(line);
  drawn.addEventListener("pointermove", (event) => {
    const index = nearest(event);
    for (const end of ["x1", "x2"]) line.setAttribute(end, places[index]);
    note.replaceChildren(...read(index));
    const [near, far, room] = places[index] < drawn.clientWidth / 2
      ? ["left", "right", places[index]] : ["right", "left", drawn.clientWidth - places[index]];
    Object.assign(note.style, { [near]: `${room + 10}px`, [far]: "auto" });
    drawn.parentElement.classList.add("pointed");
  });
  drawn.addEventListener("pointerleave", () => drawn.parentElement.classList.remove("pointed"));
  if (pick) drawn.addEventListener("click", (event) => pick(nearest(event)));
  return [drawn, note];
}

function curve(area, points, width) {
  // few points with a dot each, many faintly behind their moving mean
  const path = (some) => some.map(([step, value]) => `${area.x(step).toFixed(1)},${area.y(value).toFixed(1)}`).join(" ");
  if (points.length > Math.min(MANY_POINTS, width / 7)) {
    return [svg("polyline", { class: "faint", points: path(points) }), svg("polyline", { points: path(smooth(points)) })];
  }
  return [svg("polyline", { points: path(points) }),
    ...points.map(([step, value]) => svg("circle", { cx: area.x(step).toFixed(1), cy: area.y(value).toFixed(1), r: 2.2 }))];
}

function lineChart(lines, height = 190, { step: current, pick } = {}) {
  // `lines`: name, color, points, and for a band `low` and `high`; a click picks a step, of which `current` is marked
  return fitted(height, (width) => {
    const all = lines.flatMap((line) => [...line.points, ...(line.low || []), ...(line.high || [])]);
    const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const [first, last] = [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1e-9)];
    const area = frame(width, height, [first, last > first + 1e-6 ? last : first + 1], padded(all.map((point) => point[1])));
    const marks = ticks(first, Math.max(last, first + 1), Math.max(2, width / 70), true);
    const drawn = canvas(width, height, area.grid, stepAxis(area, marks.map((step) => [area.x(step), step])));
    for (const line of lines) {
      const group = svg("g", { class: "line" });
      group.style.color = line.color;
      if (line.low && line.low.length > 1) {
        const around = [...line.low, ...[...line.high].reverse()].map(([step, value]) => `${area.x(step).toFixed(1)},${area.y(value).toFixed(1)}`);
        group.append(svg("polygon", { points: around.join(" ") }));
      }
      group.append(...curve(area, line.points, width));
      drawn.append(group);
    }
    if (current >= first) drawn.append(svg("line", { class: "mark", x1: area.x(current), x2: area.x(current), y1: area.top, y2: area.floor }));
    if (pick) drawn.classList.add("picks");
    const values = lines.map((line) => new Map(line.points));
    return hover(drawn, area, steps.map(area.x), (index) => [
      h("b", {}, `step ${label(steps[index], 6)}`),
      ...lines.map((line, one) => (values[one].has(steps[index])
        ? h("span", { color: line.color }, h("i"), `${line.name} ${number(values[one].get(steps[index]), 4)}`.trim()) : null)).filter(Boolean)],
    pick && ((index) => pick(steps[index])));
  });
}

function stackedBars(columns, height = 220) {
  // one bar a step, with the values of all columns stacked
  return fitted(height, (width) => {
    const steps = columns[0].points.map((point) => point[0]);
    const totals = steps.map((_, index) => columns.reduce((sum, column) => sum + column.points[index][1], 0));
    const area = frame(width, height, [-0.5, steps.length - 0.5], [0, Math.max(...totals) * 1.05 || 1]);
    const wide = Math.min(56, 0.78 * (area.x(1) - area.x(0)));
    const stride = (steps[steps.length - 1] - steps[0]) / Math.max(steps.length - 1, 1) || 1;
    const marks = steps.length > width / 40 ? ticks(steps[0], steps[steps.length - 1], width / 80, true) : steps;
    const drawn = canvas(width, height, area.grid, stepAxis(area, marks.map((step) => [area.x((step - steps[0]) / stride), step])));
    steps.forEach((_, index) => {
      let base = 0;
      for (const column of columns) {
        const value = column.points[index][1];
        if (value > 0) {
          drawn.append(svg("rect", { x: (area.x(index) - wide / 2).toFixed(2), y: area.y(base + value).toFixed(2),
            width: wide.toFixed(2), height: (area.y(base) - area.y(base + value)).toFixed(2), fill: column.color }));
        }
        base += value;
      }
    });
    return hover(drawn, area, steps.map((_, index) => area.x(index)), (index) => [
      h("b", {}, `step ${label(steps[index], 6)}: ${number(totals[index])} s`),
      ...columns.filter((column) => column.points[index][1] > 0).map((column) =>
        h("span", { color: column.color }, h("i"), `${column.name} ${number(column.points[index][1])} s`))]);
  });
}

const LOOKS = { compute: "solid", wait: "pale", copy: "striped" };

function timelineChart(rows) {
  // one row a rank; a span is [phase, kind, step, begin, end] in seconds
  const [top, row, gap, left] = [24, 22, 6, 58];
  const floor = top + rows.length * (row + gap);
  return fitted(floor + 24, (width) => {
    const spans = rows.flatMap((one) => one.spans);
    const end = Math.max(...spans.map((span) => span[4]), 1e-6);
    const x = (seconds) => left + (seconds / end) * (width - left - 14);
    const grid = ticks(0, end, width / 80).flatMap((value) => [
      svg("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: floor }), caption(x(value), floor + 16, label(value))]);
    const drawn = canvas(width, floor + 24, caption(left - 8, floor + 16, "seconds", "end"), grid);
    rows.forEach((one, index) => {
      const y = top + index * (row + gap) + gap / 2;
      drawn.append(caption(left - 8, y + row / 2 + 4, `rank ${one.rank}`, "end"));
      for (const [phase, kind, step, from, to] of one.spans) {
        const wide = x(to) - x(from);
        const middle = (x(from) + wide / 2).toFixed(2);
        // a dashed line has stripes across, so that a narrow span shows them too
        const shape = kind === "copy"
          ? svg("line", { class: "striped", x1: middle, x2: middle, y1: y, y2: y + row, "stroke-width": wide.toFixed(2) })
          : svg("rect", { class: LOOKS[kind], x: x(from).toFixed(2), y, width: wide.toFixed(2), height: row });
        shape.style.setProperty("--c", phaseColor(phase));
        const tip = svg("title", {});
        tip.textContent = `rank ${one.rank}, step ${step}: ${phase}, ${kind} ${(to - from).toFixed(3)} s`;
        shape.append(tip);
        drawn.append(shape);
      }
    });
    for (const step of [...new Set(spans.map((span) => span[2]))].sort((a, b) => a - b)) {
      const at = x(Math.min(...spans.filter((span) => span[2] === step).map((span) => span[3])));
      drawn.append(svg("line", { class: "mark", x1: at, x2: at, y1: 8, y2: floor }), caption(at + 5, 16, `step ${step}`, "start"));
    }
    return [drawn];
  });
}
