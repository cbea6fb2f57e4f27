// The page: where it stands (in the address, after #), its sheets, and a run that goes on.

const POLL_MS = 2000;
const at = { tab: "", run: "", kind: "step", step: "", ticket: "", answer: "", color: "logprob", view: DATA ? "best" : "one", key: "" };
const filter = { domain: "", end: "", kept: "", low: "", high: "", shortest: "", longest: "", text: "" };
const [top_, strip, sheet, side, main] = ["top", "live", "sheet", "side", "main"].map((id) => document.getElementById(id));
let runs = [];
let run = null;
let rows = [];
let logged = NO_SAMPLES;
let loaded = "";
let series = {};
let follow = false;
let limit = SHOWN;

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const place of [at, filter]) for (const name of Object.keys(place)) if (given.has(name)) place[name] = given.get(name);
}

function go(changes, alone) {
  Object.assign(at, changes);
  const all = Object.entries({ ...at, ...filter }).filter(([, value]) => value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(all)}`);
  return alone ? null : show().catch(failed);
}

function failed(error) {
  (at.tab === "samples" ? main : sheet).replaceChildren(h("p", { className: "error", role: "alert" }, error.message));
}

async function show() {
  if (!run || run.run !== at.run) await loadRun();
  document.body.dataset.tab = at.tab;
  drawTop();
  drawLive().catch(failed);
  if (at.tab === "samples") return showSamples();
  const drawn = at.tab === "compare" ? await compareSheet() : overviewSheet(await get("overview", { run: at.run }));
  sheet.replaceChildren(h("div", { className: "sheet" }, drawn));
}

async function loadRun() {
  run = await get("run", { run: at.run });
  series = await get("series", { run: at.run, last: run.last });
  const drawn = [SCORES, ...CHARTS].flatMap((one) => Object.keys(one.lines));
  const preferred = [at.key, "val/score/mean", ...drawn, ...Object.keys(series)];
  at.key = preferred.find((key) => series[key]) || "";
  if (!run.steps[at.kind].length && run.steps.eval.length) at.kind = "eval";
  loaded = "";
}

function drawTop() {
  const names = runs.map((one) => [one.run, one.title]);
  const known = new Set(names.map(([, title]) => title));
  const options = known.size === names.length ? names : names.map(([name, title]) => [name, `${title} (${name})`]);
  const steps = run.planned ? `step ${run.last} of ${run.planned}` : `step ${run.last}`;
  const tabs = [["overview", "Overview"], ["samples", "Samples"], ["compare", "Compare"]].filter(([tab]) =>
    ({ overview: true, samples: !DATA || (DATA.step && run.steps.step.length + run.steps.eval.length), compare: DATA ? DATA.compare : runs.length > 1 })[tab]);
  const one = at.tab !== "compare";
  top_.replaceChildren(...[
    h("b", { className: "brand" }, "spmd_rl"),
    !one ? null : runs.length > 1
      ? select("Run", at.run, options, (name) => go({ run: name, step: "", ticket: "", answer: "", key: "" }))
      : h("span", { className: "title" }, run.title),
    tabs.length > 1 ? buttons("Sheet", at.tab, tabs, (tab) => go({ tab })) : null,
    at.tab === "samples" ? h("span", { className: "facts" }, fact("pipeline", run.pipeline), fact("model", short(run.model)), fact("seed", run.seed)) : null,
    !one ? null : DATA ? h("span", { className: "follow" }, steps) : h("label", { className: "follow" }, h("input", {
      type: "checkbox", checked: follow, onchange: (event) => { follow = event.target.checked; poll(); },
    }), `follow (${steps})`)].filter(Boolean));
  document.title = `${at.tab === "compare" ? "Comparison" : run.title} - spmd_rl`;
}

function short(model) {
  return model ? model.replace(/\/+$/, "").split("/").slice(-1)[0] : "";
}

// -------------------------------------------------------------------------------------------- a run that goes on

async function poll() {
  if (document.hidden || !run) return;
  try {
    await drawLive();
    const fresh = await get("run", { run: at.run });
    if (fresh.run === at.run && JSON.stringify(fresh) !== JSON.stringify(run)) {
      run = fresh;
      series = await get("series", { run: at.run, last: run.last });
      const steps = run.steps[at.kind];
      if (at.tab !== "samples") await go({});
      else if (follow && steps.length) await go({ step: String(steps[steps.length - 1]), ticket: "", answer: "" });
      else if (at.step === "") await go({});
      else { drawTop(); drawSide(); }
    }
    document.body.classList.remove("lost");
  } catch { document.body.classList.add("lost"); }
}

async function start() {
  runs = await get("runs");
  readAddress();
  const given = new URLSearchParams(location.hash.slice(1));
  follow = !given.has("step");
  if (at.tab === "") at.tab = given.has("step") ? "samples" : DATA?.compare ? "compare" : "overview";
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
if (!DATA) setInterval(poll, POLL_MS);
