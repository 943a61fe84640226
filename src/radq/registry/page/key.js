// The question for the server's key.
import { find } from "./dom.js";

// Ask for the key; the answer is null if the question was dismissed.
export function askForKey(wasRefused) {
  const dialog = find("key-dialog");
  find("key-refused").hidden = !wasRefused;
  find("key").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" ? find("key").value : null), {
      once: true,
    });
  });
}
