// The page: where it stands (in the address, after #), the list on the left, the trajectory or the group on the right.

const POLL_MS = 2000;
const SHOWN = 400;
const MANY_TOKENS = 40000;
const KINDS = [["step", "Training"], ["eval", "Held-out"]];
const at = { run: "", kind: "step", step: "", ticket: "", answer: "", color: "logprob", view: "one", key: "" };
const filter = { domain: "", end: "", kept: "", low: "", high: "", shortest: "", longest: "", text: "" };
const [top_, side, main] = ["top", "side", "main"].map((id) => document.getElementById(id));
let runs = [];
let run = null;
let rows = [];
let loaded = "";
let points = [];
let follow = false;
let limit = SHOWN;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const place of [at, filter]) for (const name of Object.keys(place)) if (given.has(name)) place[name] = given.get(name);
}

function go(changes) {
  Object.assign(at, changes);
  const all = Object.entries({ ...at, ...filter }).filter(([, value]) => value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(all)}`);
  return show().catch(failed);
}

function failed(error) {
  main.replaceChildren(h("p", { className: "error", role: "alert" }, error.message));
}

// ---------------------------------------------------------------------------------------------------- what is shown

async function show() {
  if (!run || run.run !== at.run) await loadRun();
  const steps = run.steps[at.kind];
  if (!steps.includes(Number(at.step)) || at.step === "") at.step = steps.length ? String(steps[steps.length - 1]) : "";
  const wanted = [at.run, at.kind, at.step].join("\n");
  if (wanted !== loaded) {
    rows = at.step === "" ? [] : await get("step", { run: at.run, kind: at.kind, step: at.step });
    loaded = wanted;
    limit = SHOWN;
  }
  drawTop();
  drawSide();
  await drawMain();
}

async function loadRun() {
  run = await get("run", { run: at.run });
  const preferred = ["val/score/mean", "critic/score/mean", "val/score_greedy/mean"];
  if (!run.keys.includes(at.key)) at.key = preferred.find((key) => run.keys.includes(key)) || run.keys[0] || "";
  points = at.key ? await get("series", { run: at.run, key: at.key }) : [];
}

function drawTop() {
  const names = runs.map((one) => [one.run, one.title]);
  const known = new Set(names.map(([, title]) => title));
  const options = known.size === names.length ? names : names.map(([name, title]) => [name, `${title} (${name})`]);
  const steps = run.planned ? `step ${run.last} of ${run.planned}` : `step ${run.last}`;
  top_.replaceChildren(
    h("b", { className: "brand" }, "spmd_rl"),
    runs.length > 1
      ? select("Run", at.run, options, (name) => go({ run: name, step: "", ticket: "", answer: "", key: "" }))
      : h("span", { className: "title" }, run.title),
    h("span", { className: "facts" }, fact("pipeline", run.pipeline), fact("model", short(run.model)), fact("seed", run.seed)),
    h("label", { className: "follow" }, h("input", {
      type: "checkbox", checked: follow, onchange: (event) => { follow = event.target.checked; poll(); },
    }), `follow (${steps})`));
  document.title = `${run.title} - spmd_rl view`;
}

function short(model) {
  return model ? model.replace(/\/+$/, "").split("/").slice(-1)[0] : "";
}

// ------------------------------------------------------------------------------------------------------- the list

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
      run.keys.length ? select("Metric", at.key, run.keys.map((key) => [key, key]), async (key) => {
        at.key = key;
        points = await get("series", { run: at.run, key });
        go({});
      }) : null,
      points.length ? chart(points, Number(at.step), (step) => steps.length && pick(near(step))) : null,
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
    h("p", { className: "count" }, count === rows.length ? `${count} trajectories` : `${count} of ${rows.length} trajectories`,
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
      type: "button", className: "group-head", ariaCurrent: at.view === "group" && at.ticket === String(ticket),
      title: "side by side", onclick: () => go({ ticket: String(ticket), answer: String(group[0].answer), view: "group" }),
    }, h("span", {}, `ticket ${ticket}`), h("span", { className: "soft" }, group[0].domain), h("b", {}, number(mean(group.map((row) => row.score))))),
    group.map((row) => h("button", {
      type: "button", className: "row", ariaCurrent: isAt(row),
      onclick: () => go({ ticket: String(row.ticket), answer: String(row.answer), view: "one" }),
    }, h("b", { className: `score ${tone(row.score)}` }, number(row.score)),
    h("span", { className: "what" }, row.text || row.prompt || "(empty)"),
    h("span", { className: "soft" }, row.kept || at.kind === "eval" ? row.end : row.reject_reason)))));
  const more = picked.length > limit
    ? h("button", { type: "button", className: "more", onclick: () => { limit += SHOWN; drawSide(); } }, "show more") : null;
  const none = rows.length ? "None is like that." : `No ${at.kind === "eval" ? "held-out" : "training"} samples yet.`;
  return h("div", { className: "list" }, made, more, picked.length ? null : h("p", { className: "soft pad" }, none));
}

function isAt(row) {
  return at.view === "one" && at.ticket === String(row.ticket) && at.answer === String(row.answer);
}

// ----------------------------------------------------------------------------------- the trajectory, or the group

async function drawMain() {
  const picked = filtered();
  if (at.ticket === "" && picked.length) Object.assign(at, { ticket: String(picked[0].ticket), answer: String(picked[0].answer) });
  if (at.ticket === "" || at.step === "") return main.replaceChildren(h("p", { className: "soft pad" }, "Nothing to show yet."));
  const place = { run: at.run, kind: at.kind, step: at.step, ticket: at.ticket };
  const found = await get("trajectories", at.view === "group" ? place : { ...place, answer: at.answer });
  if (!found.length) return main.replaceChildren(h("p", { className: "soft pad" }, "This step has no such trajectory."));
  const advantages = found.flatMap((one) => one.segments.flatMap((segment) => segment.turns.map((turn) => turn.advantage)));
  const scale = {
    advantage: Math.max(0.001, ...[...advantages, ...rows.map((row) => row.advantage)].map((value) => Math.abs(value || 0))),
    coarse: found.reduce((sum, one) => sum + one.tokens, 0) > MANY_TOKENS,
  };
  const bar = h("div", { className: "bar" },
    buttons("View", at.view, [["one", "Trajectory"], ["group", "Group side by side"]], (view) => go({ view })),
    buttons("Colour of tokens", at.color, COLORS, (color) => go({ color })),
    h("span", { className: "legend" }, legend(at.color, found, scale.advantage)));
  const note = run.no_tokenizer ? h("p", { className: "note" }, `Token texts are missing: ${run.no_tokenizer}`) : null;
  const shown = at.view === "group"
    ? [task(found[0]), h("div", { className: "columns" }, found.map((one) =>
      h("article", { className: "column" }, heading(one), trajectory(one, at.color, scale, true))))]
    : found.flatMap((one) => [h("header", { className: "card" }, heading(one), film(one)), task(one), ...trajectory(one, at.color, scale, false)]);
  main.replaceChildren(bar, ...(note ? [note] : []), ...shown.filter(Boolean));
  side.querySelectorAll("[aria-current]").forEach((element) => element.ariaCurrent === "true" && element.scrollIntoView({ block: "nearest" }));
}

function move(by) {
  const picked = filtered();
  const place = picked.findIndex((row) => at.ticket === String(row.ticket) && at.answer === String(row.answer));
  const row = picked[Math.max(0, Math.min(picked.length - 1, place + by))];
  if (row) go({ ticket: String(row.ticket), answer: String(row.answer) });
}

// ------------------------------------------------------------------------------------------- following the run

async function poll() {
  if (!document.hidden && run) {
    try {
      const fresh = await get("run", { run: at.run });
      if (fresh.run === at.run && JSON.stringify(fresh) !== JSON.stringify(run)) {
        run = fresh;
        if (at.key) points = await get("series", { run: at.run, key: at.key });
        const steps = run.steps[at.kind];
        if (follow && steps.length) await go({ step: String(steps[steps.length - 1]), ticket: "", answer: "" });
        else if (at.step === "") await go({});
        else { drawTop(); drawSide(); }
      }
      document.body.classList.remove("lost");
    } catch { document.body.classList.add("lost"); }
  }
}

async function start() {
  runs = await get("runs");
  readAddress();
  follow = !new URLSearchParams(location.hash.slice(1)).has("step");
  if (!runs.some((one) => one.run === at.run)) at.run = runs[0].run;
  await go({});
}

window.addEventListener("hashchange", () => { readAddress(); show().catch(failed); });
document.addEventListener("keydown", (event) => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "j") move(1);
  if (event.key === "k") move(-1);
});
start().catch(failed);
setInterval(poll, POLL_MS);
