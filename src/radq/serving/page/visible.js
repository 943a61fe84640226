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

// A token may add no text: a special token, or one part of a character. Its name is then shown, if it can be.
export function shownText(detail) {
  const text = detail.piece ?? detail.token ?? "";
  if (text !== "") return { text, ghost: false };
  const name = detail.token ?? "";
  return { text: name === "" || name.includes("\ufffd") ? "◌" : name, ghost: true };
}
