// One episode: facts, messages, tokens.

const detail = document.getElementById("detail");
const WORLD = "world", POLICY = "policy", FROZEN = "frozen";
const FIRST_TOKENS = 4000;
const VIEWS = { messages: "Messages", tokens: "Tokens", siblings: "Siblings" };
const COLOURS = { author: "author", logprob: "logprob", advantage: "advantage", version: "policy version", mask: "loss mask" };

// The turns of all agents in the order of their steps, and all tokens in that order.
function modelOf(entry, row, texts) {
  const { episode } = entry;
  const moves = [];
  const advantages = entry.advantages ?? {};
  // A map, since an agent may have any name.
  const places = new Map();
  episode.trajectories.forEach((part, index) => {
    const agent = part.agent ?? "agent";
    part.turns.forEach((turn, k) => {
      const credit = Object.hasOwn(advantages, agent) ? advantages[agent] : undefined;
      const place = places.get(agent) ?? 0;
      places.set(agent, place + (turn.tokens?.completion.token_ids.length ?? 0));
      moves.push({
        agent, turn, trainable: part.trainable ?? true, step: turn.step ?? 0,
        restart: k === 0 && part.reason ? part.reason : "", trajectory: index,
        advantageAt: (i) => (credit === undefined ? NaN : numberOf(credit.length === 1 ? credit[0] : credit[place + i])),
      });
    });
  });
  moves.sort((a, b) => a.step - b.step);
  return { entry, episode, row, moves, texts, several: (episode.agents ?? []).length > 1, tokens: tokensOf(moves) };
}

function tokensOf(moves) {
  const tokens = [];
  moves.forEach((move, index) => {
    if (!move.turn.tokens) return;
    const { world_ids: worldIds, completion } = move.turn.tokens;
    for (const id of worldIds) {
      tokens.push({ id, author: WORLD, move: index, mask: 0, logprob: NaN, version: NaN, advantage: NaN });
    }
    completion.token_ids.forEach((id, i) => {
      tokens.push({
        id, author: move.trainable ? POLICY : FROZEN, move: index, mask: move.trainable ? 1 : 0,
        logprob: numberOf(completion.logprobs[i]), version: completion.versions[i],
        advantage: move.trainable ? move.advantageAt(i) : NaN,
      });
    });
  });
  return tokens;
}

const tokenText = (model, id) => model.texts?.[id] ?? `⟨${id}⟩`;

function headOf(model) {
  const { episode, entry, row } = model;
  const verdict = entry.verdicts.length === 1 ? entry.verdicts[0] : null;
  const ending = manifest.coded.ending[columns.ending[row]];
  return element(
    "header",
    { class: "head" },
    element("h2", null, visible(episode.task.id)),
    element(
      "p",
      { class: "path" },
      element("a", { href: `#${encodeState({ ...decodeState(location.hash), token: "" })}` }, visible(addressOf(row))),
    ),
    facts([
      ["reward", figure(columns.reward[row])],
      ["advantage", Number.isNaN(columns.advantage[row]) ? null : figure(columns.advantage[row])],
      ...Object.entries(verdict?.parts ?? {}).map(([name, value]) => [`reward, ${visible(name)}`, figure(value)]),
      ["ending", ending],
      ["outcome", manifest.coded.outcome[columns.outcome[row]]],
      ["expected", episode.task.answer && clipped(episode.task.answer)],
      ["turns", figure(columns.turns[row])],
      ["tokens", `${figure(columns.tokens[row])} of ${figure(columns.length[row])} sampled`],
      ["policy version", Number.isNaN(columns.version[row]) ? null : String(columns.version[row])],
      ["environment", episode.env_id],
      ["seed", String(episode.seed)],
      ["seconds", figure(columns.seconds[row])],
    ]),
    episode.failure ? element("p", { class: "failure" }, visible(`${episode.failure.stage} ${episode.failure.kind}: `), longText(episode.failure.detail)) : null,
    entry.verdicts.length > 1 ? verdictTable(entry.verdicts) : null,
    toolTable(episode.tools ?? {}),
  );
}

const clipped = (text) => (text.length > 300 ? `${text.slice(0, 300)}…` : text);

function verdictTable(verdicts) {
  const partsOf = (verdict) => Object.entries(verdict.parts ?? {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const rows = verdicts.map((verdict) => [verdict.agent ?? "agent", figure(verdict.total), partsOf(verdict), verdict.scorer]);
  return table("Verdicts", ["agent", "reward", "parts", "scorer"], rows);
}

function toolTable(tools) {
  const rows = Object.entries(tools).map(([name, stats]) => {
    const counts = (values) => Object.entries(values ?? {}).map(([kind, number]) => `${kind} ${number}`).join(", ");
    const ms = stats.calls ? (1000 * numberOf(stats.seconds ?? 0)) / stats.calls : NaN;
    return [name, stats.calls ?? 0, stats.malformed ?? 0, counts(stats.rejected), stats.timeouts ?? 0, counts(stats.failed), figure(ms)];
  });
  return rows.length ? table("Tools", ["tool", "calls", "malformed", "rejected", "timeouts", "failed", "ms per call"], rows) : null;
}

function messagesView(model) {
  const view = element("div", { class: "transcript" });
  const { episode } = model;
  const rewards = episode.step_rewards ?? [];
  model.moves.forEach((move, index) => {
    if (move.restart) view.append(element("div", { class: "who" }), element("p", { class: "hint" }, visible(`The history was restarted: ${move.restart}.`)));
    for (const message of move.turn.observation) view.append(...messageNodes(message, WORLD, move.agent, model));
    view.append(...messageNodes(move.turn.action, move.trainable ? POLICY : FROZEN, move.agent, model));
    const reward = model.several ? undefined : rewards[index];
    if (reward !== null && reward !== undefined) {
      view.append(element("div", { class: "who" }), element("p", { class: "hint" }, visible(`reward of this step: ${rewardText(reward)}`)));
    }
  });
  if (!model.moves.length) {
    for (const message of episode.task.prompt) view.append(...messageNodes(message, WORLD, "", model));
  }
  return view;
}

function rewardText(reward) {
  if (reward === null || typeof reward === "number" || reward.$float) return figure(reward);
  const parts = Object.entries(reward.parts ?? reward).map(([name, value]) => `${name} ${figure(value)}`);
  return reward.parts ? `${figure(reward.total)} (${parts.join(", ")})` : parts.join(", ");
}

function messageNodes(message, author, agent, model) {
  const who = author === WORLD ? message.role : model.several ? agent : author;
  const { text, images } = contentOf(message);
  const block = element("div", { class: `block ${author}` });
  if (message.role === "tool") block.append(element("p", { class: "label" }, visible(`result${message.name ? ` of ${message.name}` : ""}`)));
  if (message.reasoning) block.append(element("p", { class: "label" }, "reasoning"), longText(message.reasoning, { class: "reasoning" }));
  if (text) block.append(longText(text));
  for (const url of images.slice(0, 20)) block.append(element("img", { src: url, alt: "an image of this message", loading: "lazy" }));
  for (const call of message.tool_calls ?? []) block.append(callNode(call));
  return [element("div", { class: "who" }, visible(who)), block];
}

function callNode(call) {
  const node = element("div", { class: "call" }, element("p", { class: "label" }, visible(`call of ${call.name || "no tool"}`)));
  const values = call.arguments;
  if (values) {
    for (const [name, value] of Object.entries(values)) {
      const text = typeof value === "string" ? value : JSON.stringify(value);
      node.append(element("div", { class: "argument" }, element("span", { class: "label" }, visible(name)), longText(text)));
    }
  } else if (call.raw) node.append(longText(call.raw));
  if (call.error) node.append(element("div", { class: "failure" }, longText(call.error)));
  return node;
}

const colourOf = ({ colour }) => (Object.hasOwn(COLOURS, colour) ? colour : "author");

function tokensView(model, state) {
  if (!model.tokens.length) return element("p", { class: "hint" }, "This episode was played without tokens.");
  const colour = colourOf(state);
  const legend = element("p", { class: "key" }, ...legendOf(model, colour));
  const choice = element("select", { id: "colour", on: { change: (event) => navigate({ colour: event.target.value }) } });
  for (const [value, name] of Object.entries(COLOURS)) choice.append(element("option", { value, selected: value === colour }, name));
  const view = element("div", { class: `transcript by-${colour}` });
  view.addEventListener("click", (event) => {
    const index = event.target.dataset?.index;
    if (index !== undefined) navigate({ token: index });
  });
  const chosen = Math.min(Number(state.token) || 0, model.tokens.length - 1);
  const first = chosen < FIRST_TOKENS ? 0 : chosen - FIRST_TOKENS / 2;
  if (first > 0) {
    const earlier = element("button", { type: "button", class: "more" }, `Show earlier tokens (${plural(first, "token")} before these)`);
    earlier.addEventListener("click", () => navigate({ token: String(Math.max(first - FIRST_TOKENS / 2, 0)) }));
    view.append(earlier);
  }
  appendTokens(view, model, first, Math.min(first + FIRST_TOKENS, model.tokens.length), colour);
  const note = model.texts === null ? element("p", { class: "hint" }, "Tokens are shown by their ids: agentrl view found no tokenizer (--tokenizer names one).") : null;
  return element("div", null, element("label", { class: "row" }, "Colour ", choice), legend, note, view);
}

function appendTokens(view, model, first, last, colour) {
  const scale = scaleOf(model, colour);
  let block = null;
  for (let index = first; index < last; index++) {
    const token = model.tokens[index];
    const before = model.tokens[index - 1];
    if (block === null || before.author !== token.author || before.move !== token.move) {
      block = element("div", { class: `block ${token.author}` });
      const { agent } = model.moves[token.move];
      const who = model.several ? (token.author === WORLD ? `to ${agent}` : agent) : token.author;
      view.append(element("div", { class: "who" }, visible(who)), block);
    }
    block.append(tokenNode(model, token, index, scale));
  }
  if (last < model.tokens.length) {
    const rest = model.tokens.length - last;
    const more = element("button", { type: "button", class: "more" }, `Show more (${plural(rest, "token")} are left)`);
    more.addEventListener("click", () => {
      more.remove();
      appendTokens(view, model, last, Math.min(last + FIRST_TOKENS, model.tokens.length), colour);
    });
    view.append(more);
  }
}

function tokenNode(model, token, index, scale) {
  const node = element("span", { class: "t", title: describeToken(token) }, visible(tokenText(model, token.id)));
  node.dataset.index = String(index);
  scale(node, token);
  return node;
}

function describeToken(token) {
  const parts = [token.author, `mask ${token.mask}`];
  if (token.author !== WORLD) {
    parts.push(`logprob ${figure(token.logprob)} (p = ${Math.exp(Math.min(token.logprob, 0)).toFixed(2)})`, `version ${token.version}`);
    if (!Number.isNaN(token.advantage)) parts.push(`advantage ${figure(token.advantage)}`);
  }
  return [...parts, `id ${token.id}`].join(" · ");
}

// How a colouring marks a token: a class, or the strength of a tint.
function scaleOf(model, colour) {
  const sampled = model.tokens.filter((token) => token.author !== WORLD);
  if (colour === "advantage") {
    const most = sampled.reduce((size, { advantage }) => Math.max(size, Math.abs(advantage) || 0), 0) || 1;
    return (node, { advantage }) => {
      if (Number.isNaN(advantage)) return;
      node.classList.add(advantage < 0 ? "below" : "above");
      node.style.setProperty("--tint", (Math.abs(advantage) / most).toFixed(2));
    };
  }
  if (colour === "version") {
    const versions = versionsOf(model);
    return (node, { version }) => {
      if (!Number.isNaN(version)) node.classList.add(`v${versions.indexOf(version) % 6}`);
    };
  }
  if (colour === "mask") return (node, { mask }) => node.classList.add(mask ? "in-loss" : "out-of-loss");
  return (node, { logprob, author }) => {
    if (author === POLICY && !Number.isNaN(logprob)) node.style.setProperty("--surprise", Math.min(Math.max(-logprob / 3, 0), 1).toFixed(2));
  };
}

const versionsOf = (model) => [...new Set(model.tokens.map(({ version }) => version).filter((version) => !Number.isNaN(version)))].sort((a, b) => a - b);

function legendOf(model, colour) {
  const sample = (text, author, ...classes) => element("span", { class: `block ${author}` }, element("span", { class: ["t", ...classes].join(" ") }, text));
  const tinted = (text, name, value, ...classes) => {
    const node = sample(text, POLICY, ...classes);
    node.firstChild.style.setProperty(name, value);
    return node;
  };
  if (colour === "version") return versionsOf(model).slice(0, 12).map((version, k) => sample(`version ${version}`, POLICY, `v${k % 6}`));
  if (colour === "mask") return [sample("mask 1: trained on", POLICY, "in-loss"), sample("mask 0", WORLD, "out-of-loss")];
  if (colour === "advantage") return [tinted("better than expected", "--tint", "1", "above"), tinted("worse", "--tint", "1", "below"), sample("no advantage", WORLD)];
  const authors = [sample("the world wrote this", WORLD), sample("the policy wrote this", POLICY), tinted("here it was unsure", "--surprise", "1")];
  return model.tokens.some(({ author }) => author === FROZEN) ? [...authors, sample("an agent that is not trained", FROZEN)] : authors;
}

// Shows all that is recorded of a token; false = it is not among the drawn ones.
function selectToken(model, index) {
  for (const node of detail.querySelectorAll(".t.chosen")) node.classList.remove("chosen");
  document.getElementById("token")?.remove();
  const token = index === "" ? undefined : model.tokens[Number(index)];
  if (!token) return true;
  const node = detail.querySelector(`.t[data-index="${Number(index)}"]`);
  if (node === null) return false;
  node.classList.add("chosen");
  node.scrollIntoView({ block: "nearest" });
  const move = model.moves[token.move];
  detail.append(
    element(
      "aside",
      { id: "token", "aria-label": "the chosen token", "aria-live": "polite" },
      facts([
        ["token", `${index} of ${model.tokens.length}`],
        ["text", JSON.stringify(tokenText(model, token.id))],
        ["id", String(token.id)],
        ["author", model.several ? `${token.author}, ${move.agent}` : token.author],
        ["loss mask", String(token.mask)],
        ["logprob", token.author === WORLD ? null : figure(token.logprob)],
        ["probability", token.author === WORLD ? null : figure(Math.exp(Math.min(token.logprob, 0)))],
        ["policy version", Number.isNaN(token.version) ? null : String(token.version)],
        ["advantage", Number.isNaN(token.advantage) ? null : figure(token.advantage)],
        ["turn", String(token.move)],
      ]),
    ),
  );
  return true;
}
