// Elements and text. Every text becomes a text node; nothing is parsed as markup.

function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name === "class") node.className = value;
    else if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Controls, halves of surrogate pairs and direction marks as ‹U+001B›; line breaks and tabs stay.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]/gu;
const codeOf = (character) => `‹U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
const visible = (text) => String(text).replace(INVISIBLE, codeOf);

const FIRST_PIECE = 4000;
const NEXT_PIECE = 20000;

// A long text in pieces: a browser takes seconds to break a line of a million characters.
function longText(text, properties) {
  const block = element("div", properties);
  let shown = 0;
  const more = element("button", { type: "button", class: "more", on: { click: () => append(NEXT_PIECE) } });
  function append(size) {
    let end = Math.min(shown + size, text.length);
    const last = text.charCodeAt(end - 1);
    if (end < text.length && last >= 0xd800 && last < 0xdc00) end++;
    more.remove();
    block.append(visible(text.slice(shown, end)));
    shown = end;
    if (shown < text.length) {
      more.textContent = `Show more (${(text.length - shown).toLocaleString("en")} characters are left)`;
      block.append(more);
    }
  }
  append(FIRST_PIECE);
  return block;
}

// Numbers as the report shows them; the journal writes NaN and infinities as {"$float": "nan"}.
function numberOf(value) {
  if (typeof value === "number") return value;
  if (value === null || value === undefined) return NaN;
  return { inf: Infinity, "-inf": -Infinity }[value.$float] ?? NaN;
}

function figure(value) {
  const number = numberOf(value);
  if (Number.isNaN(number)) return "–";
  const size = Math.abs(number);
  if (!Number.isFinite(number)) return String(number);
  if (size >= 1000) return Math.round(number).toLocaleString("en");
  if (Number.isInteger(number)) return String(number);
  if (size >= 10) return number.toFixed(1);
  return size >= 0.001 ? number.toFixed(3) : number.toExponential(1);
}

const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]*$/;

function contentOf(message) {
  const content = message.content ?? "";
  if (typeof content === "string") return { text: content, images: [] };
  return {
    text: content.map((part) => part.text ?? "").join(""),
    images: content.map((part) => part.url).filter((url) => url !== undefined && IMAGE.test(url)),
  };
}

function facts(pairs) {
  const list = element("dl", { class: "facts" });
  for (const [name, value] of pairs) {
    if (value === null || value === undefined || value === "") continue;
    list.append(element("div", null, element("dt", null, name), element("dd", null, visible(value))));
  }
  return list;
}

function table(caption, names, rows) {
  const head = element("tr", null, ...names.map((name) => element("th", { scope: "col" }, name)));
  const cell = (value) => element("td", null, value instanceof Node ? value : visible(value));
  return element(
    "div",
    { class: "wide" },
    element(
      "table",
      { class: "tokens" },
      element("caption", null, caption),
      element("thead", null, head),
      element("tbody", null, ...rows.map((row) => element("tr", null, ...row.map(cell)))),
    ),
  );
}
