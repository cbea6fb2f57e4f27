// Elements, numbers and requests. What comes from the sample log is written by a model: it becomes text nodes alone.

const DATA = JSON.parse(document.getElementById("data").textContent || "null");

function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "data") Object.assign(element.dataset, value);
    else if (name === "color") element.style.setProperty("--c", value);
    else if (value !== undefined && value !== null) element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function select(label, value, options, onchange) {
  const made = options.map(([key, text]) => h("option", { value: key, textContent: text, selected: key === value }));
  return h("select", { title: label, ariaLabel: label, onchange: (event) => onchange(event.target.value) }, made);
}

function buttons(label, value, options, onchange) {
  const made = options.map(([key, text]) =>
    h("button", { type: "button", textContent: text, ariaPressed: key === value, onclick: () => onchange(key) }));
  return h("div", { className: "buttons", role: "group", ariaLabel: label }, made);
}

function fact(name, value, tone) {
  if (value === null || value === undefined || value === "") return null;
  return h("span", { className: `fact ${tone || ""}` }, h("i", {}, name), String(value));
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "\u2013";
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(digits))).replace("-", "\u2212");
}

function signed(value) {
  return value === null || value === undefined ? "\u2013" : (value > 0 ? "+" : "") + number(value);
}

function tone(value) {
  return value > 0 ? "good" : value < 0 ? "bad" : "";
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function key(name, color, look) {
  return h("span", { className: "key", color }, h("i", { className: look || "" }), name);
}

async function get(name, query) {
  if (DATA) return embedded(name, query || {});
  const given = Object.entries(query || {}).filter(([, value]) => value !== undefined && value !== "");
  const reply = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  const content = await reply.json();
  if (!reply.ok) throw new Error(content.error);
  return content;
}

function embedded(name, query) {
  // what a server would reply, from the data in the page
  const { run, kind, step } = query;
  if (name === "step") return DATA.step[run][`${kind} ${step}`];
  if (name !== "trajectories") return query.run === undefined ? DATA[name] : DATA[name][run];
  return DATA.trajectories[run][`${kind} ${step}`].filter((one) =>
    (query.marked || String(one.ticket) === query.ticket) && (!query.answer || String(one.answer) === query.answer));
}
