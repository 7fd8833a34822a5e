// Which rows the filters and the search leave, and in which order.

const RANGES = { reward: "reward", tokens: "tokens", turns: "turns" };
const SORTS = {
  "": "as played", "-reward": "highest reward", reward: "lowest reward", "-advantage": "highest advantage",
  advantage: "lowest advantage", "-tokens": "most tokens", tokens: "fewest tokens", "-turns": "most turns",
  "-problems": "most tool problems", "-seconds": "slowest",
};

// "0.5..1", "..3" and "2.." as [low, high].
function boundsOf(text) {
  const [low, high] = (text ?? "").split("..");
  const bound = (part, otherwise) => (part === undefined || part === "" || Number.isNaN(Number(part)) ? otherwise : Number(part));
  return [bound(low, -Infinity), bound(high, Infinity)];
}

// Whether a file has one of the names; * stands for any characters.
function filesNamed(names) {
  const patterns = names.split(",").map((name) => name.trim()).filter(Boolean).map((name) => name.split("*"));
  return manifest.files.map(({ key }) => patterns.some((parts) => isNamed(key, parts)));
}

function isNamed(key, parts) {
  const [first, last] = [parts[0], parts[parts.length - 1]];
  if (parts.length === 1) return key === first;
  if (!key.startsWith(first) || !key.endsWith(last)) return false;
  let at = first.length;
  for (const part of parts.slice(1, -1)) {
    at = key.indexOf(part, at);
    if (at === -1) return false;
    at += part.length;
  }
  return at <= key.length - last.length;
}

// A test of rows for the filters of a state, without the search.
function filterOf(state) {
  const tests = [];
  for (const name of ["ending", "outcome", "env"]) {
    if (!state[name]) continue;
    const code = manifest.coded[name].indexOf(state[name]);
    tests.push((row) => columns[name][row] === code);
  }
  if (state.fact) {
    const [key, code] = factNamed(state.fact);
    const column = columns.facts.get(key);
    tests.push((row) => column !== undefined && column[row] === code);
  }
  if (state.tool) {
    const has = manifest.coded.tools.map((names) => names.split("\n").includes(state.tool));
    tests.push((row) => has[columns.tools[row]]);
  }
  for (const name of Object.keys(RANGES)) {
    if (!state[name]) continue;
    const [low, high] = boundsOf(state[name]);
    const column = columns[name];
    tests.push((row) => column[row] >= low && column[row] <= high);
  }
  if (state.step) {
    const [low, high] = boundsOf(state.step);
    const inside = manifest.files.map(({ step }) => step !== null && step >= low && step <= high);
    tests.push((row) => inside[columns.file[row]]);
  }
  if (state.file) {
    const named = filesNamed(state.file);
    tests.push((row) => named[columns.file[row]]);
  }
  return (row) => tests.every((test) => test(row));
}

// The choices of the filter by facts of tasks: [name, key, number of the value].
const factChoices = () =>
  Object.entries(manifest.facts).flatMap(([key, words]) => words.map((word, code) => [`${key}=${word}`, key, code]));

function factNamed(name) {
  const choice = factChoices().find(([other]) => other === name);
  return choice ? choice.slice(1) : [undefined, -1];
}

function filteredRows(state, numRead) {
  const keep = filterOf(state);
  const rows = new Uint32Array(numRead);
  let size = 0;
  for (let row = 0; row < numRead; row++) if (keep(row)) rows[size++] = row;
  return rows.slice(0, size);
}

function sortRows(rows, sort) {
  if (!sort || !Object.hasOwn(SORTS, sort)) return rows;
  const sign = sort.startsWith("-") ? -1 : 1;
  const column = columns[sort.replace("-", "")];
  // Rows without a value come last in either order.
  return rows.sort((a, b) => {
    const [x, y] = [column[a], column[b]];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
    return sign * (x - y) || a - b;
  });
}

// A search for a text: parts are read in order, unless a signature shows that a part has no match.
class Search {
  constructor(query) {
    this.needle = query.toLowerCase();
    this.hits = new Uint8Array(manifest.episodes);
    this.done = new Set();
    this.stopped = false;
  }

  // Reads the parts that hold one of the rows; calls `progress` after each with the share that is done.
  async run(rows, progress) {
    const parts = await this.partsOf(rows);
    const ahead = new Map();
    const readAhead = (part) => {
      const bytes = readBytes("texts", part);
      // Reported where it is awaited.
      bytes.catch(() => {});
      ahead.set(part, bytes);
    };
    for (let k = 0; k < parts.length; k++) {
      for (const part of parts.slice(k, k + 4)) if (!ahead.has(part)) readAhead(part);
      const bytes = await ahead.get(parts[k]);
      ahead.delete(parts[k]);
      if (this.stopped) return false;
      this.scan(textOfBytes(bytes), manifest.starts.texts[parts[k]]);
      this.done.add(parts[k]);
      progress((k + 1) / parts.length);
    }
    return !this.stopped;
  }

  async partsOf(rows) {
    const starts = manifest.starts.texts;
    const candidates = new Set();
    for (let i = 0, part = 0; i < rows.length; i++) {
      while (part + 1 < starts.length && starts[part + 1] <= rows[i]) part++;
      candidates.add(part);
    }
    const signatures = await readSignatures();
    return [...candidates].filter((part) => !this.done.has(part) && this.mayHold(signatures, part));
  }

  mayHold(signatures, part) {
    const bytes = new TextEncoder().encode(this.needle);
    const size = signatures.length / manifest.starts.texts.length;
    for (let i = 0; i + 2 < bytes.length; i++) {
      const bit = (bytes[i] * 7919 + bytes[i + 1] * 131 + bytes[i + 2]) % (size * 8);
      if (!(signatures[part * size + (bit >> 3)] & (1 << (bit & 7)))) return false;
    }
    return true;
  }

  // Marks the rows whose text has the needle; texts are separated by NUL.
  scan(text, first) {
    let row = first;
    let end = text.indexOf("\0");
    for (let at = text.indexOf(this.needle); at !== -1; ) {
      while (end !== -1 && end < at) {
        row++;
        end = text.indexOf("\0", end + 1);
      }
      this.hits[row] = 1;
      if (end === -1) return;
      at = text.indexOf(this.needle, end + 1);
      row++;
      end = text.indexOf("\0", end + 1);
    }
  }
}

let signatures = null;
function readSignatures() {
  signatures ??= readBytes("signatures", 0);
  return signatures;
}
