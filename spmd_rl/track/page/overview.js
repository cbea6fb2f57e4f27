// The sheets of curves: all of one run, and runs compared.

function figure(title, note, keys, drawing) {
  return h("figure", { className: "card figure" }, h("figcaption", {}, h("h3", {}, title),
    h("span", { className: "note" }, note), h("span", { className: "keys" }, keys)), drawing);
}

function curves({ title, note, lines }, height) {
  return figure(title, note, lines.filter((line) => line.name).map((line) => key(line.name, line.color)), lineChart(lines, height));
}

function section(title, ...content) {
  const found = content.flat().filter(Boolean);
  return found.length ? h("section", {}, h("h2", {}, title), found) : null;
}

function table(head, rows, className) {
  const line = (cells, tag) => h("tr", {}, cells.map((cell) => h(tag, {}, cell)));
  return h("div", { className: "wide" }, h("table", { className: className || "" }, line(head, "th"), rows.map((row) => line(row, "td"))));
}

function overviewSheet(all) {
  const facts = all.facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  return [
    h("h1", {}, run.title),
    h("p", { className: "lead" }, all.summary),
    h("dl", { className: "about" }, facts),
    all.command ? h("pre", { className: "command", textContent: all.command }) : null,
    h("div", { className: "tiles" }, all.tiles.map(([value, words]) => h("div", { className: "tile" }, h("b", {}, value), h("span", {}, words)))),
    section("Scores", all.scores && curves(all.scores, 260)),
    section("Training", all.charts.length ? h("div", { className: "grid2" }, all.charts.map((one) => curves(one))) : null),
    section("Any metric", run.keys.length ? anyMetric() : null),
    section("Where the time goes", all.times && figure(all.times.title, all.times.note,
      all.times.columns.map((column) => key(`${column.name} ${(100 * column.share).toFixed(1)} %`, column.color)), stackedBars(all.times.columns))),
    section("Timeline", all.timeline && figure("Phases by rank", all.timeline.note,
      Object.entries(all.timeline.colors).map(([phase, color]) => key(phase, color)),
      [timelineChart(all.timeline.ranks, all.timeline.colors), kindsTable(all.timeline.ranks)])),
    section("Settings", h("details", {}, h("summary", {}, "config.yaml"), h("pre", { className: "card", textContent: all.settings }))),
    h("footer", {}, all.drawn),
  ];
}

function kindsTable(rows) {
  const kinds = Object.keys(rows[0].seconds);
  return table(["", ...kinds.map((kind) => key(kind, "var(--soft)", LOOKS[kind]))], rows.map((row) => {
    const total = Object.values(row.seconds).reduce((sum, value) => sum + value, 0);
    return [`rank ${row.rank}`, ...kinds.map((kind) => `${row.seconds[kind].toFixed(2)} s \u00b7 ${((100 * row.seconds[kind]) / total).toFixed(1)} %`)];
  }));
}

function anyMetric() {
  const box = h("div", { className: "card figure" });
  const draw = async (key) => {
    at.key = key;
    points = await get("series", { run: at.run, key });
    box.replaceChildren(h("figcaption", {}, select("Metric", key, run.keys.map((one) => [one, one]), (one) => { draw(one); go({}, true); })),
      points.length ? lineChart([{ name: "", color: "var(--c1)", points }]) : h("p", { className: "soft" }, "No values yet."));
  };
  draw(at.key);
  return box;
}

function compareSheet(all) {
  const lines = (chart) => chart.lines.map((line) => ({ ...all.lanes[line.lane], ...line }));
  return [
    h("h1", {}, all.title),
    h("div", { className: "keys lanes" }, all.lanes.map((lane) => key(lane.name, lane.color))),
    h("div", { className: "grid2" }, all.charts.map((chart) => figure(chart.title, chart.note, [], lineChart(lines(chart), 220)))),
    section("Runs", table(all.columns, all.rows, "runs")),
  ];
}
