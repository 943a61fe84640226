// Texts of tokens with their whitespace made visible. The marks are drawn by the stylesheet, beside the text itself,
// so that copied text is the model's text.

const MARKS = { "\n": "↵", "\r": "␍", "\t": "⇥" };
const NAMES = { "\n": "line break", "\r": "carriage return", "\t": "tab", " ": "space" };

// Cut a text into parts { text, mark }: mark is null for plain text. A single space between words stays unmarked unless
// allSpaces is set; tabs, line breaks, unusual and repeated spaces are always marked.
export function visibleParts(text, allSpaces = false) {
  const parts = [];
  for (const [run] of text.matchAll(/\r\n|\s+|\S+/gu)) {
    if (!/^\s/u.test(run)) parts.push({ text: run, mark: null });
    else if (run === " " && !allSpaces && text !== " ") parts.push({ text: run, mark: null });
    else for (const character of run) parts.push({ text: character, mark: MARKS[character] ?? "·" });
  }
  return parts;
}

// The words in which a screen reader names a token.
export function spokenText(text) {
  if (text === "") return "no text";
  if (text.trim() !== "") return text.trim();
  const first = [...text][0];
  const name = NAMES[first] ?? "blank";
  return text.length === 1 ? name : `${text.length} blanks, first a ${name}`;
}

const UNFINISHED = "\ufffd"; // what stands for the first bytes of a character

// Whether a token is the beginning of a character that later tokens complete.
export function isPart(detail) {
  const token = detail.token ?? "";
  return (detail.piece ?? "").trim() === "" && (detail.piece === token ? token === "" : token.includes(UNFINISHED));
}

// The same token at the end of a prompt: what comes after it begins with the character, but not with what is before it.
export const asBegun = (detail) => ({ ...detail, piece: detail.token.replace(/\ufffd+$/u, "") });

// The text of tokens that belong together. They may add none: a special token is shown by its name, and the beginning
// of a character by a circle.
export function shownText(details) {
  const text = details.map((detail) => detail.piece ?? detail.token ?? "").join("");
  if (text !== "") return { text, ghost: false };
  return { text: details.some(isPart) ? "◌" : details[0].token, ghost: true };
}

// The name of a candidate: bytes of an unfinished character are shown as a circle.
export const candidateName = (token) => token.replace(/\ufffd+/gu, "◌") || "◌";

// --- long texts ---

const LONGEST = 420;
const KEPT = [120, 160]; // characters at the beginning and at the end

// The places between which a text is folded, at spaces if there are any near; null for a text that is shown whole.
export function foldPlaces(text) {
  if (text.length <= LONGEST) return null;
  const space = (place) => {
    const found = text.slice(place, place + 24).search(/\s/u);
    return found < 0 ? whole(text, place) : place + found;
  };
  return [space(KEPT[0]), space(text.length - KEPT[1])];
}

// A place that is not inside a character of two code units.
const whole = (text, place) => place + Number(/[\udc00-\udfff]/.test(text[place] ?? ""));
