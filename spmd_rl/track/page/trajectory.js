// One trajectory: its task, its turns with tokens in colours, and what the environment returned.

const COLORS = [["none", "Text"], ["logprob", "Logprob"], ["mask", "Mask"], ["advantage", "Advantage"], ["version", "Version"]];
const seen = (url) => h("img", { className: "picture seen", src: url, alt: "a picture of the prompt" });
const SPECIAL = /^(<[|\uff5c].*[|\uff5c]>|<\/?s>|<(bos|eos|pad|start_of_turn|end_of_turn)>)$/;

function tint(color, share) {
  const percent = Math.round(72 * Math.max(0, Math.min(1, share)));
  return percent ? `color-mix(in srgb, ${color} ${percent}%, transparent)` : "";
}

function versionColor(version) {
  return `var(--c${1 + (version % 8)})`;
}

function background(color, token, scale) {
  if (color === "logprob") return tint("var(--c2)", -token.logprob / 4);
  if (color === "mask") return token.trained ? tint("var(--c3)", 0.45) : tint("var(--axis)", 0.55);
  if (color === "version") return tint(versionColor(token.version), 0.5);
  if (color === "advantage" && token.advantage) {
    return tint(token.advantage > 0 ? "var(--c1)" : "var(--c5)", Math.sqrt(Math.abs(token.advantage) / scale));
  }
  return "";
}

function legend(color, trajectories, scale) {
  const key = (text, paint) => {
    const box = h("i");
    box.style.background = paint;
    return h("span", { className: "key" }, box, text);
  };
  if (color === "logprob") {
    return [0, 1, 2, 4].map((nats) => key(nats ? `p ${number(Math.exp(-nats), 2)}` : "p 1", tint("var(--c2)", nats / 4)));
  }
  if (color === "mask") {
    return [key("trained on", tint("var(--c3)", 0.45)), key("not trained on", tint("var(--axis)", 0.55))];
  }
  if (color === "advantage") {
    return [key(signed(-scale), tint("var(--c5)", 1)), key("0", ""), key(signed(scale), tint("var(--c1)", 1))];
  }
  if (color === "version") {
    const turns = trajectories.flatMap((one) => one.segments.flatMap((segment) => segment.turns));
    const versions = [...new Set(turns.flatMap((turn) => turn.versions))].sort((a, b) => a - b);
    return versions.slice(-8).map((version) => key(`version ${version}`, tint(versionColor(version), 0.5)));
  }
  return [];
}

function tokens(turn, segment, color, scale) {
  if (turn.picture) return [h("img", { className: "picture", src: turn.picture, alt: turn.text })];
  const text = h("pre", { className: "tokens", textContent: turn.text || "(empty)" });
  // a report has the tokens of its first samples alone
  if (!turn.token_ids.length) return [text];
  const texts = turn.tokens || turn.token_ids.map((id) => `${id} `);
  const advantage = turn.advantage ?? segment.advantage;
  const all = texts.map((one, index) => ({
    text: one, id: turn.token_ids[index], logprob: turn.logprobs[index], version: turn.versions[index], advantage, trained: segment.kept,
  }));
  const made = scale.coarse ? merged(all, color, scale) : all.map((token) => single(token, color, scale));
  return [...(turn.tokens ? [] : [text]), h("pre", { className: "tokens" }, made)];
}

function single(token, color, scale) {
  const span = h("span", { textContent: token.text });
  if (SPECIAL.test(token.text)) span.className = "special";
  span.style.background = background(color, token, scale.advantage);
  span.title = [`token ${token.id}`, `logprob ${number(token.logprob)} (p ${number(Math.exp(token.logprob), 2)})`,
    `version ${token.version}`, token.advantage === null ? "" : `advantage ${signed(token.advantage)}`,
    token.trained ? "trained on" : "not trained on"].filter(Boolean).join("\n");
  return span;
}

function merged(all, color, scale) {
  // of very many tokens, those of one colour that follow each other become one element
  const found = [];
  for (const token of all) {
    const paint = background(color, { ...token, logprob: Math.round(token.logprob) }, scale.advantage);
    const last = found[found.length - 1];
    if (last && last.paint === paint) last.texts.push(token.text);
    else found.push({ paint, texts: [token.text] });
  }
  return found.map(({ paint, texts }) => {
    const span = h("span", { textContent: texts.join("") });
    span.style.background = paint;
    return span;
  });
}

function given(turn, first, color) {
  // what the policy was given before it answered: never trained on
  if (!turn.num_given) return null;
  const count = `${turn.num_given} tokens given`;
  if (turn.prompt === null) return h("p", { className: "given-count" }, count);
  const text = h("pre", { className: color === "mask" ? "given masked" : "given", textContent: turn.prompt });
  return h("details", { className: "context", open: first || color === "mask" }, h("summary", {}, count), text);
}

function environment(step) {
  const action = step.action === null
    ? h("span", { className: "action none" }, "no action")
    : h("code", { className: "action" }, step.action.trim() || "(empty)");
  const metrics = Object.entries(step.metrics || {}).map(([name, value]) => fact(name, number(value)));
  const seen = step.board || step.observation || "(nothing)";
  const dense = seen.split("\n").every((line) => line.length < 24 && !line.includes(" "));
  const both = step.board && step.observation && step.board.trim() !== step.observation.trim();
  return h("div", { className: "environment" },
    h("div", { className: "outcome" }, action, h("b", { className: `reward ${tone(step.reward)}` }, signed(step.reward))),
    h("pre", { className: dense ? "board dense" : "board", textContent: seen }),
    both ? h("details", {}, h("summary", {}, "observation"), h("pre", { className: "given", textContent: step.observation })) : null,
    h("div", { className: "facts" }, metrics, fact("state", step.state)));
}

function trajectory(one, color, scale, narrow) {
  const turns = [];
  let index = 0;
  for (const segment of one.segments) {
    if (index) turns.push(h("h3", { className: "segment" }, "A new context begins: earlier turns as the template renders them"));
    segment.turns.forEach((turn) => {
      index += 1;
      const about = h("div", { className: "facts" },
        h("b", { className: "turn-number" }, one.turns > 1 ? `Turn ${index}` : "Answer"),
        fact("tokens", turn.num_tokens || null),
        fact("mean logprob", turn.logprobs.length ? number(mean(turn.logprobs)) : null),
        fact("advantage", turn.advantage === undefined || turn.advantage === null ? null : signed(turn.advantage)),
        turn.finish_reason === "stop" ? null : fact("ended by", turn.finish_reason, "bad"));
      const pictures = one.messages.length ? [] : turn.pictures || []; // those of a row are among its messages
      const policy = h("div", { className: "policy" }, about, pictures.map(seen), given(turn, index === 1 && !narrow, color),
        tokens(turn, segment, color, scale));
      const classes = ["turn", turn.step ? "with-step" : "", narrow ? "narrow" : ""].join(" ");
      turns.push(h("section", { className: classes, id: narrow ? "" : `turn-${index}` },
        policy, turn.step ? environment(turn.step) : null));
    });
  }
  return turns;
}

function heading(one) {
  const facts = [
    fact("end", one.end),
    fact("turns", one.turns > 1 ? one.turns : null),
    fact("segments", one.segments.length > 1 ? one.segments.length : null),
    fact("tokens", one.tokens || null),
    fact("advantage", one.advantage === null ? null : signed(one.advantage), tone(one.advantage)),
    fact("version", one.version),
    one.status === "ok" ? null : fact("verdict", one.status, "bad"),
    one.kept || one.reject_reason === "held out" ? null : fact("not trained on", one.reject_reason, "bad"),
    one.greedy ? fact("drawn", "greedy") : null,
  ];
  const parts = Object.entries(one.verdict.parts || {}).filter(([name]) => !name.startsWith("stop/"));
  return [
    h("div", { className: "headline" },
      h("b", { className: `score ${tone(one.score)}` }, number(one.score)),
      h("span", { className: "name" }, `ticket ${one.ticket}, answer ${one.answer}`),
      h("span", { className: "domain" }, one.domain)),
    h("div", { className: "facts" }, facts),
    parts.length ? h("div", { className: "facts parts" }, parts.map(([name, value]) => fact(name, number(value)))) : null,
    one.verdict.detail ? h("p", { className: "detail" }, one.verdict.detail) : null,
  ];
}

function task(one) {
  // the dataset's row; a task of an environment has no messages, its first observation stands in the first turn
  const part = (one) => (one.url ? seen(one.url) : h("pre", { textContent: one.text || "[image]" }));
  const parts = (content) => (typeof content === "string" ? [{ text: content }] : content).map(part);
  const messages = one.messages.map((message) =>
    h("div", { className: "message" }, h("i", {}, message.role), h("div", {}, parts(message.content))));
  const truth = one.ground_truth ? h("div", { className: "message" }, h("i", {}, "ground truth"), h("pre", { textContent: one.ground_truth })) : null;
  return messages.length || truth ? h("section", { className: "task" }, messages, truth) : null;
}

function film(one) {
  // one cell a turn: the action and its reward
  const turns = one.segments.flatMap((segment) => segment.turns);
  if (turns.length < 2) return null;
  const cells = turns.map((turn, index) => h("button", {
    type: "button",
    className: `cell ${turn.step ? tone(turn.step.reward) : ""}`,
    title: `turn ${index + 1}`,
    onclick: () => document.getElementById(`turn-${index + 1}`).scrollIntoView({ behavior: "smooth", block: "start" }),
  }, h("i", {}, String(index + 1)), turn.step ? turn.step.action ?? "no action" : turn.finish_reason,
  turn.step ? h("b", {}, signed(turn.step.reward)) : null));
  return h("nav", { className: "film" }, cells);
}
