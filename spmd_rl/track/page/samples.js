// The samples of a step: the list with its filters on the left; a trajectory, its group, or the best and worst on the right.

const SHOWN = 400;
const MANY_TOKENS = 40000;
const KINDS = [["step", "Training"], ["eval", "Held-out"]];
const NO_SAMPLES = { rows: [], marked: {}, mean: null, total: 0 };
// of a group, a report has some samples alone: it shows none side by side, and no mean
const VIEWS = [["best", "Best and worst"], ["one", "Trajectory"], ["group", "Group side by side"]];
const MARKS = { best: ["Best", "var(--c3)"], worst: ["Worst", "var(--c5)"], some: ["Some", "var(--other)"], suspect: ["Suspect", "var(--c8)"] };

async function showSamples() {
  const steps = run.steps[at.kind];
  if (!steps.includes(Number(at.step)) || at.step === "") at.step = steps.length ? String(steps[steps.length - 1]) : "";
  const wanted = [at.run, at.kind, at.step].join("\n");
  if (wanted !== loaded) {
    logged = at.step === "" ? NO_SAMPLES : await get("step", { run: at.run, kind: at.kind, step: at.step });
    rows = logged.rows;
    loaded = wanted;
    limit = SHOWN;
  }
  drawSide();
  await drawMain();
}

function drawSide() {
  const scrolled = side.querySelector(".list")?.scrollTop || 0;
  const focused = document.activeElement?.dataset?.filter;
  const steps = run.steps[at.kind];
  const place = steps.indexOf(Number(at.step));
  const pick = (step) => go({ step: String(step), ticket: "", answer: "" });
  const near = (step) => steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps[0]);
  const picked = filtered();
  side.replaceChildren(
    h("div", { className: "panel" },
      at.key ? [metricSelect(at.key, (key) => go({ key })),
        lineChart([{ name: "", color: "var(--c1)", points: series[at.key] }], 110, { step: Number(at.step), pick: (step) => steps.length && pick(near(step)) })] : null,
      h("div", { className: "steps" },
        buttons("Samples", at.kind, KINDS, (kind) => go({ kind, step: "", ticket: "", answer: "" })),
        h("button", { type: "button", title: "earlier step", disabled: place <= 0, onclick: () => pick(steps[place - 1]) }, "\u2039"),
        select("Step", at.step, steps.map((step) => [String(step), `step ${step}`]), pick),
        h("button", { type: "button", title: "later step", disabled: place >= steps.length - 1, onclick: () => pick(steps[place + 1]) }, "\u203a"))),
    filters(picked.length),
    list(picked));
  side.querySelector(".list").scrollTop = scrolled;
  if (focused) side.querySelector(`[data-filter="${focused}"]`)?.focus();
}

function filters(count) {
  const change = (name, value) => { filter[name] = value; limit = SHOWN; go({}); };
  const input = (name, label, width) => h("input", {
    type: width ? "number" : "search", placeholder: label, ariaLabel: label, value: filter[name], data: { filter: name },
    className: width || "", onchange: (event) => change(name, event.target.value),
  });
  const values = (of) => [...new Set(rows.map(of).filter(Boolean))].sort();
  const choice = (name, label, found) => select(label, filter[name], [["", label], ...found.map((value) => [value, value])], (value) => change(name, value));
  const domains = values((row) => row.domain);
  return h("div", { className: "panel filters" },
    domains.length > 1 || filter.domain ? choice("domain", "any domain", domains) : null,
    choice("end", "any end", values((row) => row.end)),
    at.kind === "step" ? choice("kept", "trained on or not", ["trained on", ...values((row) => row.reject_reason)]) : null,
    h("span", { className: "range" }, "score", input("low", "min", "num"), input("high", "max", "num")),
    h("span", { className: "range" }, "tokens", input("shortest", "min", "num"), input("longest", "max", "num")),
    input("text", "words of prompt, answer or actions"),
    h("p", { className: "count" }, count === logged.total ? `${count} trajectories` : `${count} of ${logged.total} trajectories`,
      logged.total > rows.length ? h("span", { className: "soft" }, "(the report has the best and the worst)") : null,
      count === rows.length ? null : h("button", { type: "button", onclick: () => {
        for (const name of Object.keys(filter)) filter[name] = "";
        go({});
      } }, "show all")));
}

function filtered() {
  const within = (value, low, high) => (low === "" || (value !== null && value >= Number(low))) && (high === "" || (value !== null && value <= Number(high)));
  const words = filter.text.toLowerCase();
  return rows.filter((row) =>
    (!filter.domain || row.domain === filter.domain) && (!filter.end || row.end === filter.end)
    && (!filter.kept || (row.kept ? "trained on" : row.reject_reason) === filter.kept)
    && within(row.score, filter.low, filter.high) && within(row.tokens, filter.shortest, filter.longest)
    && (!words || `${row.prompt} ${row.text}`.toLowerCase().includes(words)));
}

function list(picked) {
  const groups = new Map();
  for (const row of picked.slice(0, limit)) groups.set(row.ticket, [...(groups.get(row.ticket) || []), row]);
  const alone = new Set(rows.map((row) => row.ticket)).size === rows.length;
  const made = [...groups].map(([ticket, group]) => h("div", { className: "group" },
    alone ? null : h("button", {
      type: "button", className: "group-head", disabled: Boolean(DATA), ariaCurrent: at.view === "group" && at.ticket === String(ticket),
      title: "side by side", onclick: () => go({ ticket: String(ticket), answer: String(group[0].answer), view: "group" }),
    }, h("span", {}, `ticket ${ticket}`), h("span", { className: "soft" }, group[0].domain), DATA ? null : h("b", {}, number(mean(group.map((row) => row.score))))),
    group.map((row) => h("button", {
      type: "button", className: "row", ariaCurrent: isAt(row),
      onclick: () => go({ ticket: String(row.ticket), answer: String(row.answer), view: "one" }),
    }, h("b", { className: `score ${tone(row.score)}` }, number(row.score)),
    h("span", { className: "what" }, row.text || row.prompt || "(empty)"),
    h("span", { className: "soft" }, row.kept || at.kind === "eval" ? row.end : row.reject_reason)))));
  const more = picked.length > limit
    ? h("button", { type: "button", className: "more", onclick: () => { limit += SHOWN; drawSide(); } }, "show more") : null;
  const none = rows.length ? "None is like that." : logged.total ? "None has a score." : `No ${at.kind === "eval" ? "held-out" : "training"} samples yet.`;
  return h("div", { className: "list" }, made, more, picked.length ? null : h("p", { className: "soft pad" }, none));
}

function isAt(row) {
  return at.view === "one" && at.ticket === String(row.ticket) && at.answer === String(row.answer);
}

// ----------------------------------------------------------------------------------- the trajectory, or the group

async function drawMain() {
  const picked = filtered();
  if (at.ticket === "" && picked.length) Object.assign(at, { ticket: String(picked[0].ticket), answer: String(picked[0].answer) });
  if (at.step === "" || (at.ticket === "" && at.view !== "best")) return main.replaceChildren(h("p", { className: "soft pad" }, "Nothing to show yet."));
  const place = { run: at.run, kind: at.kind, step: at.step };
  const found = await get("trajectories", at.view === "best" ? { ...place, marked: "1" }
    : { ...place, ticket: at.ticket, answer: at.view === "one" ? at.answer : "" });
  const advantages = found.flatMap((one) => one.segments.flatMap((segment) => segment.turns.map((turn) => turn.advantage)));
  const scale = {
    advantage: Math.max(0.001, ...[...advantages, ...rows.map((row) => row.advantage)].map((value) => Math.abs(value || 0))),
    coarse: found.reduce((sum, one) => sum + one.tokens, 0) > MANY_TOKENS,
  };
  const bar = h("div", { className: "bar" },
    buttons("View", at.view, DATA ? VIEWS.slice(0, 2) : VIEWS, (view) => go({ view })),
    buttons("Colour of tokens", at.color, COLORS, (color) => go({ color })),
    h("span", { className: "legend" }, legend(at.color, found, scale.advantage)));
  const note = run.no_tokenizer && found.some((one) => one.tokens) ? h("p", { className: "note" }, `Token texts are missing: ${run.no_tokenizer}`) : null;
  const column = (one, whole) => h("article", { className: "column" }, heading(one), whole ? task(one) : null, trajectory(one, at.color, scale, true));
  const shown = at.view === "best" ? extremes(found, column)
    : !found.length ? [h("p", { className: "soft pad" }, "This step has no such trajectory.")]
    : at.view === "group" ? [task(found[0]), h("div", { className: "columns" }, found.map((one) => column(one, false)))]
    : found.flatMap((one) => [h("header", { className: "card" }, heading(one), film(one)), task(one), ...trajectory(one, at.color, scale, false)]);
  main.replaceChildren(...[bar, note, ...shown].filter(Boolean));
  side.querySelectorAll("[aria-current]").forEach((element) => element.ariaCurrent === "true" && element.scrollIntoView({ block: "nearest" }));
}

function extremes(found, column) {
  const named = (place) => found.find((one) => one.ticket === place[0] && one.answer === place[1]);
  const groups = Object.entries(logged.marked).filter(([, places]) => places.length).map(([mark, places]) => {
    const [title, color] = MARKS[mark];
    // the best of nothing is not good
    const nothing = mark === "best" && places.every((place) => named(place).score <= 0);
    return h("div", { className: "extreme", color: nothing ? "var(--other)" : color }, h("h3", {}, `${title} of step ${at.step}`), places.map((place) => column(named(place), true)));
  });
  const scores = logged.mean === null ? "No sample of this step has a score."
    : `Mean score ${number(logged.mean)}${logged.marked.some.length ? "; all scores are equal" : ""}.`;
  return [h("p", { className: "note" }, scores), h("div", { className: "extremes" }, groups)];
}

function move(by) {
  const picked = filtered();
  const place = picked.findIndex((row) => at.ticket === String(row.ticket) && at.answer === String(row.answer));
  const row = picked[Math.max(0, Math.min(picked.length - 1, place + by))];
  if (row) go({ ticket: String(row.ticket), answer: String(row.answer), view: "one" });
}
