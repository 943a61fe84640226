// The dialog with the request as text: for curl, for Python, for the openai package.
import { find, make } from "./dom.js";
import { FORMS, plainRequest } from "./request.js";

export function createCopying(info, store) {
  const dialog = find("copy-dialog");
  let form = Object.keys(FORMS)[0];
  const origin = new URL(".", location.href).href.replace(/\/$/, "");

  const show = () => {
    const { state } = store;
    find("copy-text").textContent = FORMS[form](origin, plainRequest(state, state.strengths), info.needs_key);
    find("copied").textContent = "";
  };
  const choose = (name) => {
    form = name;
    show();
  };
  const radios = Object.keys(FORMS).map((name) => {
    const radio = make("input", {
      type: "radio",
      name: "form",
      value: name,
      checked: name === form,
      on: { change: () => choose(name) },
    });
    return make("label", {}, radio, make("span", {}, name));
  });
  find("copy-forms").append(...radios);
  find("copy-open").addEventListener("click", () => {
    show();
    dialog.showModal();
  });
  find("copy-close").addEventListener("click", () => dialog.close());
  find("copy").addEventListener("click", async () => {
    find("copied").textContent = (await copy(find("copy-text").textContent))
      ? "Copied."
      : "Select the text and copy it: the browser does not allow this page to.";
  });
  find("copy-link").addEventListener("click", async () => {
    find("copied").textContent = (await copy(location.href))
      ? "The link is copied."
      : "Copy the address of this page: the browser does not allow the page to.";
  });
}

// Browsers offer the clipboard to pages from this machine or over https only.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
