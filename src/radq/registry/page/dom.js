// Elements of the page. Texts become text nodes, so that no text of a model or a user is ever read as HTML.

export const find = (id) => document.getElementById(id);

// make("button", { class: "link", type: "button", on: { click } }, "text", child)
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) setProperty(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function setProperty(element, name, value) {
  if (name === "on") {
    for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
  } else if (name === "variables") {
    for (const [variable, number] of Object.entries(value)) element.style.setProperty(`--${variable}`, String(number));
  } else if (value === true) {
    element.setAttribute(name, "");
  } else if (value !== false && value !== null && value !== undefined) {
    element.setAttribute(name, String(value));
  }
}

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

// Say something to screen readers without moving the focus: used at the beginning and the end of a run only.
export function announce(text) {
  find("announcement").textContent = text;
}
