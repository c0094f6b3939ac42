// Builds elements. Text becomes text nodes, never markup: nothing that a topic holds can become part of the page.

const SVG = "http://www.w3.org/2000/svg";

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** An element: properties that are functions listen (`onclick`), `style` is an object, the rest are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return append(element, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  return append(element, children);
}

/** Puts these children in the place of all there are. */
export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** A button; `kind` is "", "primary", "danger" or "quiet". */
export function button(label, onclick, { kind = "", title = null, disabled = false, ...rest } = {}) {
  return h("button", { type: "button", class: kind || null, title, disabled, onclick, ...rest }, label);
}

/** A labelled input of a form. */
export function field(label, input, note = null) {
  return h("label", { class: "field" }, h("span", { class: "label" }, label), input, note && h("span", { class: "note" }, note));
}

export function select(options, value, properties = {}) {
  const element = h(
    "select",
    properties,
    options.map((one) => {
      const [key, label] = Array.isArray(one) ? one : [one, one];
      return h("option", { value: key }, label);
    }),
  );
  element.value = value;
  return element;
}
