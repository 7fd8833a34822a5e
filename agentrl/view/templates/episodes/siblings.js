// The siblings of a group side by side, from their first difference on.

const MAX_SIBLINGS = 16;
const BEFORE = 12;
const AFTER = 300;
const MAX_WORDS = 20000;

// What two episodes are compared by: tokens, or words where there are none.
function piecesOf(model) {
  if (model.tokens.length) {
    return model.tokens.map(({ id, author }) => ({ key: `${author} ${id}`, text: tokenText(model, id), author }));
  }
  const pieces = [];
  const add = (message, author) => {
    const text = [message.reasoning, contentOf(message).text, ...(message.tool_calls ?? []).map((call) => call.raw || JSON.stringify([call.name, call.arguments]))]
      .filter(Boolean).join("\n").slice(0, 200000);
    for (const [word] of text.matchAll(/\s{1,200}|\S{1,200}/g)) if (pieces.length < MAX_WORDS) pieces.push({ key: `${author} ${word}`, text: word, author });
  };
  for (const move of model.moves) {
    for (const message of move.turn.observation) add(message, WORLD);
    add(move.turn.action, move.trainable ? POLICY : FROZEN);
  }
  return pieces;
}

// The first place where two differ; -1 = they are equal.
function firstDifference(pieces, others) {
  const size = Math.min(pieces.length, others.length);
  for (let i = 0; i < size; i++) if (pieces[i].key !== others[i].key) return i;
  return pieces.length === others.length ? -1 : size;
}

async function siblingsView(model) {
  const rows = siblingsOf(model.row);
  if (rows.length < 2) return element("p", { class: "hint" }, "This episode has no siblings: no other one of its file played the same task.");
  const others = rows.filter((row) => row !== model.row).slice(0, MAX_SIBLINGS - 1);
  const models = [model];
  for (const row of others) models.push(modelOf(await readEntry(row), row, model.texts));
  const pieces = models.map(piecesOf);
  const places = pieces.map((own) => firstDifference(pieces[0], own));
  const differing = places.slice(1).filter((place) => place !== -1);
  places[0] = differing.length ? Math.min(...differing) : -1;
  const mean = rows.reduce((sum, row) => sum + (columns.reward[row] || 0), 0) / rows.length;
  const note = rows.length > models.length ? ` The first ${models.length} of ${rows.length} are shown.` : "";
  return element(
    "div",
    null,
    element("p", { class: "hint" }, `${plural(rows.length, "episode")} of one task, mean reward ${figure(mean)}. Each is compared with the one on the left; the first difference is marked.${note}`),
    element("div", { class: "siblings" }, ...models.map((sibling, k) => siblingColumn(sibling, pieces[k], places[k], k === 0))),
  );
}

function siblingColumn(model, pieces, place, isOpen) {
  const { row } = model;
  const unit = model.tokens.length ? "token" : "word";
  const ending = manifest.coded.ending[columns.ending[row]];
  const advantage = Number.isNaN(columns.advantage[row]) ? "" : `, advantage ${figure(columns.advantage[row])}`;
  const equal = place === -1 ? `equal: ${plural(pieces.length, unit)}` : `the first ${plural(place, unit)} are shared`;
  const link = element("a", { href: `#${encodeState({ ...decodeState(location.hash), episode: addressOf(row), token: "" })}` }, visible(columns.id[row]));
  return element(
    "article",
    { class: isOpen ? "sibling open" : "sibling" },
    element("h3", null, link),
    element("p", { class: "hint" }, visible(`reward ${figure(columns.reward[row])}${advantage} · ${ending} · ${plural(columns.turns[row], "turn")}`)),
    element("p", { class: "hint" }, equal),
    excerpt(pieces, place),
  );
}

function excerpt(pieces, place) {
  const middle = place === -1 ? 0 : place;
  const first = Math.max(0, middle - BEFORE);
  const block = element("div", { class: "block" });
  if (first > 0) block.append("… ");
  const append = (from, to) => {
    for (let i = from; i < to; i++) {
      const { text, author } = pieces[i];
      const tag = i === place ? "mark" : "span";
      block.append(element(tag, { class: place !== -1 && i < place ? `t shared ${author}` : `t ${author}` }, visible(text)));
    }
    if (to === pieces.length) {
      if (place === pieces.length) block.append(element("mark", null, "the end"));
      return;
    }
    const rest = pieces.length - to;
    const more = element("button", { type: "button", class: "more" }, `Show more (${rest.toLocaleString("en")} are left)`);
    more.addEventListener("click", () => {
      more.remove();
      append(to, Math.min(to + 4 * AFTER, pieces.length));
    });
    block.append(more);
  };
  append(first, Math.min(middle + AFTER, pieces.length));
  return block;
}
