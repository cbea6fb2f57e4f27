// The sheets of curves: all of one run, and runs compared.

// of a chart: metric -> its name in the legend and its colour
const SCORES = { title: "Mean score", note: "by training step", height: 260, lines: {
  "critic/score/mean": ["training", "other"], "val/score/mean": ["held-out, sampled", "c1"],
  "val/score_greedy/mean": ["held-out, greedy", "c2"], "warmup/score/mean": ["warm-up, by demonstrations", "c5"] } };
const CHARTS = [
  { title: "Loss", note: "of the step's rows and of held-out ones", lines: { "sft/loss": ["training", "other"],
    "dpo/loss": ["training", "other"], "reward_model/loss": ["training", "other"], "val/loss": ["held-out", "c1"] } },
  { title: "Accuracy", note: "share of pairs in which the chosen answer has more",
    lines: { "rewards/accuracies": ["training", "other"], "val/rewards/accuracies": ["held-out", "c1"] } },
  { title: "Margin", note: "chosen above rejected, mean", lines: { "rewards/margins": ["training", "other"], "val/rewards/margins": ["held-out", "c1"] } },
  { title: "Differentiable reward", note: "feedback.reward, mean", lines: { "feedback/reward": ["", "c1"] } },
  { title: "Distance to the teacher", note: "teacher.loss, per token", lines: { "distill/loss": ["", "c7"] } },
  { title: "Gradient norm", note: "before clipping", lines: { "actor/grad_norm": ["", "c4"] } },
  { title: "Entropy", note: "nats per sampled token", lines: { "actor/entropy": ["", "c3"] } },
  { title: "Answer length", note: "tokens, mean", lines: { "rollout/response_length/mean": ["", "c1"] } },
  { title: "Engine against trainer", note: "mean |difference| of logprobs", lines: { "train_infer/abs_diff/mean": ["", "c5"] } },
  { title: "Idle share of generation", note: "rollout/bubble", lines: { "rollout/bubble": ["", "c8"] } },
  { title: "Throughput", note: "tokens per second, all ranks", lines: { "system/tps": ["all tokens", "c6"], "system/generated_tps": ["generated", "c1"] } },
];
const PHASES = { generate: "c1", score: "c2", eval: "c3", logprobs: "c7", prepare: "c8", train: "c4", publish: "c6", checkpoint: "c5",
  coordination: "axis", track: "soft", other: "rule" };

function figure(title, note, keys, drawing) {
  return h("figure", { className: "card figure" }, h("figcaption", {}, h("h3", {}, title),
    h("span", { className: "note" }, note), h("span", { className: "keys" }, keys)), drawing);
}

function chartOf(chart) {
  // a chart with the lines that the run has; a single possible line needs no name
  const many = Object.keys(chart.lines).length > 1;
  const lines = Object.entries(chart.lines).filter(([metric]) => series[metric]).map(([metric, [name, color]]) =>
    ({ name: many ? name : "", color: `var(--${color})`, points: series[metric] }));
  if (!lines.length) return null;
  return figure(chart.title, chart.note, many ? lines.map((line) => key(line.name, line.color)) : [], lineChart(lines, chart.height));
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
  const about = { model: run.model, seed: run.seed, started: all.started, machine: all.launch.machine, ranks: all.launch.ranks, revision: all.revision };
  const facts = Object.entries(about).filter(([, value]) => value || value === 0).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, String(value))));
  const charts = CHARTS.map(chartOf).filter(Boolean);
  return [
    h("h1", {}, run.title),
    h("p", { className: "lead" }, `${all.pipeline}${run.planned ? `, ${run.last} of ${run.planned} steps` : ""} in ${all.seconds}`),
    h("dl", { className: "about" }, facts),
    all.launch.command ? h("pre", { className: "command", textContent: all.launch.command }) : null,
    h("div", { className: "tiles" }, all.tiles.map(([value, words]) => h("div", { className: "tile" }, h("b", {}, value), h("span", {}, words)))),
    section("Scores", chartOf(SCORES)),
    section("Training", charts.length ? h("div", { className: "grid2" }, charts) : null),
    section("Any metric", at.key ? anyMetric() : null),
    section("Where the time goes", stepTimes()),
    section("Timeline", all.timeline.length ? phasesByRank(all.timeline) : null),
    section("Settings", h("details", {}, h("summary", {}, "config.yaml"), h("pre", { className: "card", textContent: all.settings }))),
    h("footer", {}, all.drawn),
  ];
}

function anyMetric() {
  const box = h("div", { className: "card figure" });
  const draw = () => box.replaceChildren(
    h("figcaption", {}, metricSelect(at.key, (metric) => { go({ key: metric }, true); draw(); })),
    lineChart([{ name: "", color: "var(--c1)", points: series[at.key] }]));
  draw();
  return box;
}

function metricSelect(metric, onchange) {
  return select("Metric", metric, Object.keys(series).map((one) => [one, one]), onchange);
}

function ordered(phases) {
  const known = Object.keys(PHASES);
  return [...known.filter((phase) => phases.has(phase)), ...[...phases].filter((phase) => !known.includes(phase)).sort()];
}

function phaseColor(phase) {
  return `var(--${PHASES[phase] || "other"})`;
}

function stepTimes() {
  const steps = (series["time/total"] || []).map((point) => point[0]);
  const named = new Set(Object.keys(series).filter((metric) => metric.startsWith("time/") && metric !== "time/total").map((metric) => metric.slice(5)));
  const columns = ordered(named).map((phase) => {
    const seconds = new Map(series[`time/${phase}`]);
    const points = steps.map((step) => [step, seconds.get(step) || 0]);
    return { name: phase, color: phaseColor(phase), points, seconds: points.reduce((sum, point) => sum + point[1], 0) };
  }).filter((column) => column.seconds > 0);
  if (!columns.length) return null;
  const total = columns.reduce((sum, column) => sum + column.seconds, 0);
  const width = Math.round(Math.min(...steps.slice(1).map((step, index) => step - steps[index])));
  const note = `seconds, mean over ranks${width > 1 && steps.length > 250 ? `; a bar is the mean of ${width} steps` : ""}`;
  return figure("Time of each step", note,
    columns.map((column) => key(`${column.name} ${((100 * column.seconds) / total).toFixed(1)} %`, column.color)), stackedBars(columns));
}

function phasesByRank(ranks) {
  const spans = ranks.flatMap((one) => one.spans);
  const phases = ordered(new Set(spans.map((span) => span[0])));
  const steps = spans.map((span) => span[2]);
  const note = `steps ${Math.min(...steps)} to ${Math.max(...steps)}; waits inside a library count as compute`;
  const kinds = Object.keys(LOOKS);
  const seconds = ranks.map((one) => {
    const total = kinds.reduce((sum, kind) => sum + one.seconds[kind], 0);
    return [`rank ${one.rank}`, ...kinds.map((kind) => `${one.seconds[kind].toFixed(2)} s \u00b7 ${((100 * one.seconds[kind]) / total).toFixed(1)} %`)];
  });
  return figure("Phases by rank", note, phases.map((phase) => key(phase, phaseColor(phase))),
    [timelineChart(ranks), table(["", ...kinds.map((kind) => key(kind, "var(--soft)", LOOKS[kind]))], seconds)]);
}

async function compareSheet() {
  const all = await get("compare");
  const last = Math.max(...runs.map((one) => one.last));
  const names = all.lanes.flatMap((lane) => lane.runs);
  const found = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await get("series", { run: name, last })])));
  const titles = [SCORES, ...CHARTS].flatMap(({ title, lines }) => Object.entries(lines).map(([metric, [name]]) =>
    [metric, Object.keys(lines).length > 1 ? `${title}: ${name}` : title]));
  const asked = all.keys.length ? all.keys.map((metric) => [metric, new Map(titles).get(metric) || metric]) : titles;
  const color = (index) => (all.lanes.length <= 8 ? `var(--c${index + 1})` : `hsl(${(360 * index) / all.lanes.length} 60% 52%)`);
  const charts = asked.map(([metric, title]) => {
    const lines = all.lanes.map((lane, index) => ({ name: lane.name, color: color(index), ...band(lane.runs.map((name) => found[name][metric] || [])) }));
    const drawn = lines.filter((line) => line.points.length);
    return drawn.length ? figure(title, metric, [], lineChart(drawn, 220)) : null;
  });
  return [
    h("h1", {}, all.title),
    h("div", { className: "keys lanes" }, all.lanes.map((lane, index) => key(lane.name, color(index)))),
    h("div", { className: "grid2" }, charts.filter(Boolean)),
    section("Runs", table(all.columns, all.rows, "runs")),
  ];
}

function band(all) {
  // the mean of some runs at the steps that all of them have, and their range: a mean over fewer would jump where a run ends
  const maps = all.map((points) => new Map(points));
  const values = all[0].map((point) => point[0]).filter((step) => maps.every((one) => one.has(step)))
    .map((step) => [step, maps.map((one) => one.get(step))]);
  const points = values.map(([step, some]) => [step, mean(some)]);
  if (all.length === 1) return { points };
  return { points, low: values.map(([step, some]) => [step, Math.min(...some)]), high: values.map(([step, some]) => [step, Math.max(...some)]) };
}
