// The data: scripts that call agentrl.receive, since a page of a disk may fetch no file.

const waiting = new Map();
const scriptAddress = /^data\/[a-z]+-\d{6}\.js$/;
const checkedAddress = (address) => {
  if (!scriptAddress.test(address)) throw new TypeError(`${address} is no script of this page`);
  return address;
};
const policy = window.trustedTypes
  ? window.trustedTypes.createPolicy("agentrl", { createScriptURL: checkedAddress })
  : { createScriptURL: checkedAddress };

window.agentrl = Object.freeze({
  receive(name, text) {
    const resolve = waiting.get(name);
    waiting.delete(name);
    resolve?.(text);
  },
});

// A script that is being read is not read again.
const reading = new Map();
function readScript(name) {
  if (!reading.has(name)) {
    const result = addScript(name);
    const forget = () => reading.delete(name);
    reading.set(name, result);
    result.then(forget, forget);
  }
  return reading.get(name);
}

function addScript(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    const end = () => {
      script.remove();
      if (waiting.get(name) === resolve) waiting.delete(name);
      // Without effect on a script that was received.
      reject(new Error(`data/${name}.js cannot be read; make the pages again with agentrl view.`));
    };
    waiting.set(name, resolve);
    script.addEventListener("load", end);
    script.addEventListener("error", end);
    script.src = policy.createScriptURL(`data/${name}.js`);
    document.head.append(script);
  });
}

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < characters.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

async function readBytes(kind, number) {
  const packed = bytesOfBase64(await readScript(`${kind}-${String(number).padStart(6, "0")}`));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const textOfBytes = (bytes) => new TextDecoder().decode(bytes);

async function readJson(kind, number) {
  return JSON.parse(textOfBytes(await readBytes(kind, number)));
}

// The last few results of a function of a number; two calls at once share one result.
function remembered(size, read) {
  const results = new Map();
  return (number) => {
    const result = results.get(number) ?? read(number);
    results.delete(number);
    results.set(number, result);
    result.catch(() => results.delete(number));
    if (results.size > size) results.delete(results.keys().next().value);
    return result;
  };
}

// The place of a row in shards that begin at `starts`.
function shardOf(starts, row) {
  let low = 0;
  let high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= row) low = middle;
    else high = middle - 1;
  }
  return low;
}

let manifest = null;
const columns = {};
const COLUMN_TYPES = {
  file: Uint32Array, group: Uint32Array, env: Uint16Array, ending: Uint16Array, outcome: Uint16Array,
  tools: Uint16Array, turns: Uint32Array, tokens: Uint32Array, length: Uint32Array, calls: Uint32Array,
  problems: Uint32Array, reward: Float64Array, advantage: Float64Array, version: Float64Array, seconds: Float64Array,
};

async function readManifest() {
  manifest = await readJson("manifest", 0);
  for (const [name, Type] of Object.entries(COLUMN_TYPES)) columns[name] = new Type(manifest.episodes);
  columns.id = new Array(manifest.episodes);
  columns.task = new Array(manifest.episodes);
  columns.prompt = new Array(manifest.episodes);
  // Names of facts are anyone's: an object might take one for its own.
  columns.facts = new Map(Object.keys(manifest.facts).map((key) => [key, new Int16Array(manifest.episodes).fill(-1)]));
}

// Reads a part of the index and returns the number of rows up to its end.
async function readIndexPart(number) {
  const part = await readJson("index", number);
  const size = part.columns.id.length;
  for (const name of Object.keys(COLUMN_TYPES)) {
    const values = part.columns[name];
    for (let i = 0; i < size; i++) columns[name][part.first + i] = values[i] ?? NaN;
  }
  for (let i = 0; i < size; i++) {
    columns.id[part.first + i] = part.columns.id[i];
    columns.task[part.first + i] = part.tasks[part.columns.task[i]];
    columns.prompt[part.first + i] = part.prompts[part.columns.task[i]];
  }
  const facts = new Map(Object.entries(part.facts));
  for (const [key, column] of columns.facts) column.set(facts.get(key) ?? [], part.first);
  return part.first + size;
}

const linesOfShard = remembered(6, async (number) => textOfBytes(await readBytes("episodes", number)).split("\n"));
const tokenTexts = remembered(3, (number) => readJson("tokens", number));

async function readEntry(row) {
  const number = shardOf(manifest.starts.episodes, row);
  const lines = await linesOfShard(number);
  return JSON.parse(lines[row - manifest.starts.episodes[number]]);
}

async function readTokenTexts(row) {
  const number = manifest.files[columns.file[row]].tokens;
  return number === null ? null : tokenTexts(number);
}

const fileOf = (row) => manifest.files[columns.file[row]];
const addressOf = (row) => `${fileOf(row).key}/${columns.id[row]}`;

function rowOfAddress(address) {
  for (let file = 0, row = 0; file < manifest.files.length; row += manifest.files[file].episodes, file++) {
    const prefix = `${manifest.files[file].key}/`;
    if (!address.startsWith(prefix)) continue;
    const id = address.slice(prefix.length);
    for (let k = row; k < row + manifest.files[file].episodes; k++) if (columns.id[k] === id) return k;
  }
  return -1;
}

function siblingsOf(row) {
  const rows = [];
  for (let k = 0; k < manifest.episodes; k++) if (columns.group[k] === columns.group[row]) rows.push(k);
  return rows;
}
