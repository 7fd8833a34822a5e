// The list: only the rows in sight are elements.

const ROW_HEIGHT = 48;
// Browsers draw no element that is higher than about 16 million pixels.
const MAX_LISTED = 300000;
const list = document.getElementById("list");
const rowsNode = document.getElementById("rows");
let listed = new Uint32Array(0);
let placeOfRow = new Int32Array(0);
let openRow = -1;

function showRows(rows) {
  listed = rows.subarray(0, MAX_LISTED);
  placeOfRow = new Int32Array(manifest.episodes).fill(-1);
  for (let place = 0; place < listed.length; place++) placeOfRow[listed[place]] = place;
  rowsNode.style.height = `${listed.length * ROW_HEIGHT}px`;
  drawRows();
}

const placeOf = (row) => placeOfRow[row] ?? -1;

function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + 4);
  const nodes = [];
  for (let place = first; place < last; place++) nodes.push(rowNode(listed[place], place));
  rowsNode.replaceChildren(...nodes);
  const open = placeOf(openRow);
  if (open >= first && open < last) list.setAttribute("aria-activedescendant", `place-${open}`);
  else list.removeAttribute("aria-activedescendant");
}

function rowNode(row, place) {
  const { key, step } = fileOf(row);
  const reward = columns.reward[row];
  const ending = manifest.coded.ending[columns.ending[row]];
  const where = step === null ? key : key.replace(/_0*(\d+)$/, " $1");
  const node = element(
    "div",
    {
      class: row === openRow ? "item open" : "item",
      role: "option",
      id: `place-${place}`,
      "aria-selected": String(row === openRow),
      "aria-setsize": String(listed.length),
      "aria-posinset": String(place + 1),
      on: { click: () => navigate({ episode: addressOf(row), token: "" }, true) },
    },
    element("span", { class: "score" }, figure(reward)),
    element("span", { class: "name" }, visible(columns.prompt[row] || columns.task[row]), element("small", null, ` ${visible(columns.id[row])}`)),
    element(
      "span",
      { class: ending === "completed" ? "about" : "about bad" },
      visible(`${where} · ${columns.task[row]} · ${ending} · ${plural(columns.turns[row], "turn")} · ${plural(columns.tokens[row], "token")}`),
    ),
  );
  node.style.top = `${place * ROW_HEIGHT}px`;
  return node;
}

function revealRow(row) {
  const place = placeOf(row);
  if (place === -1) return;
  const top = place * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
}

function openNeighbour(distance) {
  if (!listed.length) return;
  const place = placeOf(openRow);
  const next = place === -1 ? 0 : Math.min(Math.max(place + distance, 0), listed.length - 1);
  navigate({ episode: addressOf(listed[next]), token: "" }, true);
}

list.addEventListener("scroll", drawRows, { passive: true });
window.addEventListener("resize", drawRows);
