// The state of the page in one place: what changes it tells everybody, and the address follows.
import { fromAddress, toAddress } from "./state.js";

const PAUSE = 250; // milliseconds; browsers refuse addresses that change with every keystroke

export function createStore(info, reportProblems) {
  const listeners = [];
  let writing = null;

  const store = {
    state: null,
    change(part) {
      store.state = { ...store.state, ...part };
      tell();
      clearTimeout(writing);
      writing = setTimeout(write, PAUSE);
    },
    listen(listener) {
      listeners.push(listener);
      listener(store.state);
    },
  };
  const tell = () => listeners.forEach((listener) => listener(store.state));
  const write = () => {
    clearTimeout(writing);
    history.replaceState(null, "", toAddress(store.state, info));
  };
  const read = () => {
    clearTimeout(writing);
    const { state, problems } = fromAddress(location.hash, info);
    store.state = state;
    tell();
    if (problems.length) reportProblems(problems.join(" "));
  };
  window.addEventListener("hashchange", read);
  window.addEventListener("pagehide", write);
  read();
  return store;
}
