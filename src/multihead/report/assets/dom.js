// Building the page: elements, SVG, and the one tooltip. Text enters as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `attributes` may hold `on: {event: handler}` and `style: {property: value}`. */
export function el(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (name === "style") {
      // Through the object model: the page's policy forbids style attributes.
      for (const [property, to] of Object.entries(value)) node.style.setProperty(property, to);
    } else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** A labeled select; `options` is a list of [value, text]. Returns [label element, select]. */
export function select(label, options, chosen, change) {
  const control = el(
    "select",
    { on: { change: () => change(control.value) } },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
  return [el("label", { class: "control" }, el("span", {}, label), control), control];
}

/** A link that opens a head; main.js listens for it. */
export function headLink(layer, head, ...children) {
  const name = headName(layer, head);
  return el("a", { class: "head-link", href: `#${name}` }, children.length ? children : name);
}

/** The short name of a head, which is also its address: L3H8. */
export function headName(layer, head) {
  return `L${layer}H${head}`;
}

/** Show `lines` beside `anchor`, inside the window; no argument hides the tooltip. */
export function tip(anchor, lines = []) {
  const box = document.getElementById("tip");
  box.hidden = !anchor;
  if (!anchor) return;
  box.replaceChildren(...lines.map((line, index) => el(index ? "div" : "strong", {}, line)));
  const around = anchor.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(
    Math.max(8, around.left + around.width / 2 - width / 2),
    document.documentElement.clientWidth - width - 8,
  );
  const above = around.top - height - 8;
  box.style.left = `${left}px`;
  box.style.top = `${above > 8 ? above : around.bottom + 8}px`;
}
