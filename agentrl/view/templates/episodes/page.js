// The state of the page is the part of its address behind #: every change is a new address, and so a link.

const FIELDS = ["q", "reward", "tokens", "turns", "step", "ending", "outcome", "tool", "env", "fact", "file", "sort", "episode", "token", "view", "colour"];
const FILTERS = FIELDS.slice(0, 12);
const RANGE_FIELDS = ["reward", "tokens", "turns", "step"];
const FORM_FIELDS = ["q", "ending", "outcome", "tool", "env", "fact", "file", "sort"];
const field = (id) => document.getElementById(id);
const count = field("count");
const bar = field("progress");
let state = {};
let model = null;
let search = null;
let numRead = 0;
let drawing = 0;

function decodeState(hash) {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  return Object.fromEntries(FIELDS.map((name) => [name, values.get(name) ?? ""]));
}

function encodeState(values) {
  const set = FIELDS.filter((name) => values[name]).map((name) => [name, values[name]]);
  return new URLSearchParams(set).toString();
}

// isStep: whether the browser's back button returns to the address before.
function navigate(changes, isStep = false) {
  // How an episode is shown belongs to that one, also to the first, which opens by itself.
  if (model !== null && ("view" in changes || "token" in changes)) changes = { episode: addressOf(model.row), ...changes };
  const address = `#${encodeState({ ...decodeState(location.hash), ...changes })}`;
  if (address === (location.hash || "#")) return;
  if (isStep) location.hash = address;
  else location.replace(address);
}

async function applyAddress() {
  const before = state;
  state = decodeState(location.hash);
  const differ = (names) => names.some((name) => (before[name] ?? "") !== state[name]);
  syncForm();
  if (differ(FILTERS)) await applyFilters();
  const isRedrawn = differ(["episode", "colour"]) || viewOf(before) !== viewOf(state);
  // A token that is not among the drawn ones needs other ones.
  if (isRedrawn || (differ(["token"]) && model !== null && !selectToken(model, state.token))) await openEpisode();
}

async function applyFilters() {
  if (search !== null) search.stopped = true;
  const rows = filteredRows(state, numRead);
  if (!state.q.trim()) {
    search = null;
    bar.hidden = true;
    present(rows, "");
    return;
  }
  const query = state.q.trim();
  const running = (search = search?.needle === query.toLowerCase() ? resumed(search) : new Search(query));
  let shown = 0;
  const show = (share) => {
    bar.value = share;
    const now = performance.now();
    if (now - shown < 150 && share < 1) return;
    shown = now;
    if (running === search) present(rows.filter((row) => running.hits[row]), share < 1 ? "so far, " : "");
  };
  bar.hidden = false;
  list.setAttribute("aria-busy", "true");
  try {
    if (await running.run(rows, show)) show(1);
  } catch (error) {
    count.textContent = visible(error.message);
  }
  if (running === search) {
    bar.hidden = true;
    list.setAttribute("aria-busy", "false");
    performance.mark("agentrl:searched");
  }
}

// The same search over other rows: what it has read counts.
function resumed(stopped) {
  const next = new Search(stopped.needle);
  next.hits = stopped.hits;
  next.done = stopped.done;
  return next;
}

function present(rows, prefix) {
  let total = 0, scored = 0;
  for (const row of rows) {
    if (Number.isNaN(columns.reward[row])) continue;
    total += columns.reward[row];
    scored++;
  }
  const mean = scored ? `, mean reward ${figure(total / scored)}` : "";
  const limit = rows.length > MAX_LISTED ? `; the first ${MAX_LISTED.toLocaleString("en")} are listed` : "";
  count.textContent = `${prefix}${rows.length.toLocaleString("en")} of ${plural(manifest.episodes, "episode")}${mean}${limit}`;
  showRows(sortRows(rows, state.sort));
  if (!search) list.setAttribute("aria-busy", String(numRead < manifest.episodes));
  performance.mark("agentrl:filtered");
}

async function openEpisode() {
  const turn = ++drawing;
  const row = state.episode ? rowOfAddress(state.episode) : (listed[0] ?? -1);
  openRow = row;
  revealRow(row);
  drawRows();
  if (row === -1) {
    model = null;
    const isRead = numRead === manifest.episodes;
    const hint = state.episode ? (isRead ? `There is no episode ${state.episode} here.` : "…") : "Choose an episode.";
    detail.replaceChildren(element("p", { class: "hint" }, visible(hint)));
    return;
  }
  try {
    if (model?.row !== row) {
      const entry = await readEntry(row);
      const texts = entry.episode.trajectories.length ? await readTokenTexts(row) : null;
      if (turn !== drawing) return;
      model = modelOf(entry, row, texts);
    }
    const view = viewOf(state);
    const body = await bodyOf(model, view);
    if (turn !== drawing) return;
    detail.replaceChildren(headOf(model), tabs(view), body);
    detail.scrollTop = 0;
    if (state.token) selectToken(model, state.token);
    performance.mark("agentrl:opened");
  } catch (error) {
    if (turn === drawing) detail.replaceChildren(element("p", { class: "failure" }, visible(error.message)));
  }
}

// A link to a token shows tokens.
const viewOf = ({ view, token }) => (Object.hasOwn(VIEWS, view ?? "") ? view : token ? "tokens" : "messages");

function bodyOf(shown, view) {
  if (view === "tokens") return tokensView(shown, state);
  return view === "siblings" ? siblingsView(shown) : messagesView(shown);
}

function tabs(view) {
  const buttons = Object.entries(VIEWS).map(([name, title]) =>
    element("button", { type: "button", "aria-pressed": String(name === view), on: { click: () => navigate({ view: name, token: "" }) } }, title),
  );
  return element("div", { class: "tabs", role: "group", "aria-label": "how the episode is shown" }, ...buttons);
}

function syncForm() {
  for (const name of FORM_FIELDS) {
    if (document.activeElement !== field(name) || !state[name]) field(name).value = state[name];
  }
  for (const name of RANGE_FIELDS) {
    const [low, high] = state[name].split("..");
    for (const [end, value] of [["low", low], ["high", high]]) {
      const input = field(`${name}-${end}`);
      if (document.activeElement !== input) input.value = value ?? "";
    }
  }
  const { q, sort, ...others } = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
  if (Object.values(others).some(Boolean)) field("more").open = true;
}

function fillChoices() {
  const fill = (id, values) => {
    const options = values.map(([value, name]) => element("option", { value }, visible(name)));
    field(id).replaceChildren(...options);
  };
  const coded = (values) => [["", "any"], ...[...values].sort().map((value) => [value, value])];
  for (const name of ["ending", "outcome", "env"]) fill(name, coded(manifest.coded[name]));
  fill("tool", coded(new Set(manifest.coded.tools.flatMap((names) => names.split("\n")).filter(Boolean))));
  fill("sort", Object.entries(SORTS));
  fill("fact", [["", "any"], ...factChoices().map(([name]) => [name, name.replace("=", " = ")]).sort()]);
  field("fact").parentElement.hidden = !columns.facts.size;
}

function listenToForm() {
  let timer = 0;
  const form = field("filters");
  const changes = () => {
    const values = Object.fromEntries(FORM_FIELDS.map((name) => [name, field(name).value]));
    for (const name of RANGE_FIELDS) {
      const [low, high] = [field(`${name}-low`).value, field(`${name}-high`).value];
      values[name] = low || high ? `${low}..${high}` : "";
    }
    return values;
  };
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => navigate(changes()), 150);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => navigate(Object.fromEntries(FILTERS.map((name) => [name, ""]))));
  field("show-keys").addEventListener("click", () => field("keys").showModal());
}

function openSibling(distance) {
  if (model === null) return;
  const rows = siblingsOf(model.row);
  const next = rows[rows.indexOf(model.row) + distance];
  if (next !== undefined) navigate({ episode: addressOf(next), token: "" }, true);
}

function moveToken(distance) {
  if (model === null || !model.tokens.length || viewOf(state) !== "tokens") return false;
  const next = state.token === "" ? 0 : Number(state.token) + distance;
  navigate({ token: String(Math.min(Math.max(next, 0), model.tokens.length - 1)), view: "tokens" });
  return true;
}

function nextColour() {
  const names = Object.keys(COLOURS);
  navigate({ colour: names[(names.indexOf(colourOf(state)) + 1) % names.length], view: "tokens" });
}

const KEYS = {
  j: () => openNeighbour(1), k: () => openNeighbour(-1), "[": () => openSibling(-1), "]": () => openSibling(1),
  m: () => navigate({ view: "messages", token: "" }), t: () => navigate({ view: "tokens" }),
  s: () => navigate({ view: "siblings", token: "" }), c: nextColour, "/": () => field("q").focus(),
  "?": () => field("keys").showModal(), ArrowLeft: () => moveToken(-1), ArrowRight: () => moveToken(1),
};
const LIST_KEYS = {
  ArrowDown: () => openNeighbour(1), ArrowUp: () => openNeighbour(-1), PageDown: () => openNeighbour(10),
  PageUp: () => openNeighbour(-10), Home: () => openNeighbour(-listed.length), End: () => openNeighbour(listed.length),
};

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || field("keys").open) return;
    const isField = /^(?:INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isField && event.key === "Escape") event.target.blur();
    if (isField) return;
    const call = KEYS[event.key] ?? (event.target === list ? LIST_KEYS[event.key] : undefined);
    if (call === undefined || call() === false) return;
    event.preventDefault();
  });
}

async function start() {
  await readManifest();
  state = decodeState("");
  fillChoices();
  listenToForm();
  listenToKeys();
  state = { ...decodeState(location.hash), episode: "" };
  syncForm();
  for (let part = 0; part < manifest.starts.index.length; part++) {
    numRead = await readIndexPart(part);
    // The first rows at once; the search begins when all are there.
    if ((part === 0 && !state.q) || numRead === manifest.episodes) await applyFilters();
  }
  if (!manifest.episodes) present(new Uint32Array(0), "");
  window.addEventListener("hashchange", applyAddress);
  await applyAddress();
  if (!state.episode && listed.length) await openEpisode();
  document.documentElement.dataset.state = "ready";
}

start().catch((error) => {
  count.textContent = visible(error.message);
});
