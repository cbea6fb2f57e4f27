// The strip of a run that goes on: its state, its alarms, and the phase of every rank.

const STATES = { running: "good", ended: "", unknown: "", silent: "bad", killed: "bad", failed: "bad" };

async function drawLive() {
  if (DATA) return;
  strip.hidden = at.tab === "compare";
  const now = await get("live", { run: at.run });
  if (now.state === "unknown") return strip.replaceChildren();
  const alarms = Object.entries(now.alarms).map(([name, text]) => h("div", { className: "alarm", role: "alert" }, h("b", {}, name), text));
  strip.replaceChildren(
    h("div", { className: "facts" }, h("b", { className: STATES[now.state] }, now.state), alarms.length ? null : h("span", { className: "soft" }, now.why)),
    ...alarms,
    h("div", { className: "ranks" }, now.ranks.map((one) => {
      const where = `rank ${one.rank}, step ${one.step}: ${one.phase || "between phases"}, ${one.kind}${one.call ? ` (${one.call})` : ""}`;
      return h("span", { className: "rank", color: phaseColor(one.phase), title: `${where}; last line ${one.silent} s ago` },
        h("i", { className: LOOKS[one.kind] }), `rank ${one.rank} `, h("b", {}, one.phase || "\u2013"), ` ${one.seconds.toFixed(0)} s`);
    })));
}
