// The page: reads the form, asks, shows.

import { Answer, turn } from "./answer.js";
import * as charts from "./charts.js";
import { Passes, firstDifference } from "./passes.js";
import { apiKey, chat, health, keepKey } from "./stream.js";

const $ = (id) => document.getElementById(id);
const state = { messages: [], stop: null, native: 1, draft: false };

// --- what the server is ---------------------------------------------------------------------------

async function introduce() {
  try {
    const found = await health();
    state.native = found.native_block_size ?? 1;
    state.draft = found.draft !== "off";
    $("model").textContent = found.model;
    $("draft").textContent = state.draft ? `draft ${found.draft}` : "no draft";
    $("draft").classList.toggle("off", !state.draft);
    if (found.draft_off_because) alarm(`No draft: ${found.draft_off_because}`);
    const sizes = Array.from({ length: state.native }, (_, i) => i + 1);
    for (const size of sizes) $("block").add(new Option(size === 1 ? "1 (plain)" : size, size));
    $("compare").disabled = $("block").disabled = !state.draft;
  } catch (problem) {
    refuse(problem);
  }
}

function alarm(words) {
  $("alert").textContent = words;
  $("alert").hidden = !words;
}

function refuse(problem) {
  if (problem.status === 401) {
    $("key-label").hidden = false;
    $("key").focus();
  }
  alarm(problem.message || "the server cannot be reached");
}

// --- asking ---------------------------------------------------------------------------------------

function options() {
  const temperature = Number($("temperature").value) || 0;
  const chosen = {
    messages: [...state.messages],
    temperature,
    max_tokens: Math.max(1, Math.round(Number($("max-tokens").value)) || 256),
  };
  // two runs that sample can only be compared with one seed
  if (temperature > 0) chosen.seed = Math.floor(Math.random() * 2 ** 31);
  const block = $("block").value;
  if (block) chosen.speculative = { block_size: block === "auto" ? block : Number(block) };
  return chosen;
}

async function ask(text) {
  alarm("");
  $("welcome").hidden = true;
  const both = $("compare").checked && state.draft;
  const answers = [new Answer("With the draft"), ...(both ? [new Answer("Without it", true)] : [])];
  $("chat").append(turn(text, answers));
  $("chat").lastElementChild.scrollIntoView({ block: "end" });
  state.messages.push({ role: "user", content: text });
  const asked = options();
  busy(true);
  state.stop = new AbortController();
  const runs = [];
  try {
    for (const [i, answer] of answers.entries()) {
      const body = i ? { ...asked, speculative: { enabled: false } } : asked;
      runs.push(new Passes());
      answer.begin();
      await follow(body, answer, runs);
      if (!i) state.messages.push({ role: "assistant", content: answer.content });
    }
    if (both) judge(answers, runs);
    tell(runs);
  } catch (problem) {
    stopped(problem, answers, runs);
  } finally {
    busy(false);
  }
}

// Streams one answer; the charts show the run with the draft, the speed bars both.
async function follow(body, answer, runs) {
  const run = runs.at(-1);
  let due = false;
  const redraw = () => {
    due = false;
    draw(runs);
  };
  await chat(
    body,
    (frame, now) => {
      const choice = frame.choices[0];
      answer.content += choice?.delta.content ?? "";
      if (choice?.origins) answer.add(choice.origins.pieces, run.add(choice.origins, now));
      if (frame.metrics) run.close(frame.metrics, choice?.finish_reason);
      if (!due) {
        due = true;
        requestAnimationFrame(redraw);
      }
    },
    state.stop.signal,
  );
  answer.end(summary(run));
  draw(runs);
}

function stopped(problem, answers, runs) {
  const left = problem.name === "AbortError";
  const open = answers[Math.max(0, runs.length - 1)];
  const words = left ? "stopped" : problem.message;
  (left ? open.end : open.fail).call(open, words);
  answers.slice(runs.length).forEach((answer) => answer.end("not asked"));
  // the next turn goes on from what is there; a question without an answer is taken back
  if (state.messages.at(-1).role === "user") {
    if (left && answers[0].content) state.messages.push({ role: "assistant", content: answers[0].content });
    else state.messages.pop();
  }
  if (!left) refuse(problem);
  $("status").textContent = words;
}

function judge(answers, runs) {
  const [fast, plain] = runs;
  const place = firstDifference(fast.ids, plain.ids);
  const same = place === null;
  const ratio = fast.rate && plain.rate ? `, ${(fast.rate / plain.rate).toFixed(2)} x plain speed` : "";
  answers[0].badge(same ? `same ${fast.tokens} tokens${ratio}` : `differs from token ${place + 1}`, same);
}

// --- showing --------------------------------------------------------------------------------------

const figure = (value, digits) => (value === null ? "–" : value.toFixed(digits));

function summary(run) {
  const parts = [`${run.tokens} tokens`];
  if (run.rate) parts.push(`${run.rate.toFixed(1)} tok/s`);
  if (run.acceptanceRate === null) parts.push("plain decoding");
  else {
    parts.push(`${figure(run.meanCommitted, 2)} committed a pass`);
    parts.push(`${charts.percent(run.acceptanceRate)} of drafts accepted`);
  }
  if (run.finish === "length") parts.push("cut at max tokens");
  return parts.join(" · ");
}

function draw(runs) {
  const [fast, plain] = runs;
  charts.strip($("strip"), fast);
  charts.blockSizes($("blocks"), fast);
  charts.positions($("positions"), $("position-table").tBodies[0], fast);
  charts.shares($("origin-bar"), fast.counts);
  for (const [kind, count] of Object.entries(fast.counts)) $(`count-${kind}`).textContent = count;
  $("mean").textContent = figure(fast.meanCommitted, 2);
  $("rate").textContent = fast.acceptanceRate === null ? "" : charts.percent(fast.acceptanceRate);
  $("block-now").textContent = fast.rounds.at(-1)?.block ?? "";
  drawSpeed(fast, plain);
}

function drawSpeed(fast, plain) {
  const measured = plain?.rate ?? null;
  const known = measured ?? (fast.speedup && fast.rate ? fast.rate / fast.speedup : null);
  charts.speeds($("speed-bars"), [
    { name: "with the draft", kind: "draft", rate: fast.rate },
    { name: "plain", kind: "fallback", rate: known },
  ]);
  const ratio = known && fast.rate ? `${(fast.rate / known).toFixed(2)} x plain: ` : "";
  const timed = known ? "plain steps as timed so far" : "no plain step timed yet";
  const how = measured ? "on this prompt" : timed;
  $("speed-note").textContent = `tokens a second · ${ratio}${how}`;
}

function tell(runs) {
  $("status").textContent = `Answer complete. ${runs.map(summary).join(". Without the draft: ")}`;
}

function busy(running) {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running);
  $("chat").setAttribute("aria-busy", running);
  if (running) $("status").textContent = "Answering";
  if (!running) state.stop = null;
}

// --- the form -------------------------------------------------------------------------------------

function fit() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${Math.min($("prompt").scrollHeight, 220)}px`;
}

function submit() {
  if (state.stop) {
    state.stop.abort();
    return;
  }
  const text = $("prompt").value.trim();
  if (!text) {
    $("prompt").focus();
    return;
  }
  $("prompt").value = "";
  fit();
  ask(text);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!state.stop) submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.stop?.abort();
});
for (const button of document.querySelectorAll(".example")) {
  button.addEventListener("click", () => {
    if (!state.stop) ask(button.textContent);
    $("prompt").focus();
  });
}
$("new-chat").addEventListener("click", () => {
  state.stop?.abort();
  state.messages = [];
  for (const old of document.querySelectorAll(".turn")) old.remove();
  $("welcome").hidden = false;
  alarm("");
  draw([new Passes()]);
  $("prompt").focus();
});
$("key").addEventListener("change", () => {
  keepKey($("key").value.trim());
  alarm("");
  introduce();
});

const THEMES = ["auto", "light", "dark"];

function theme(name) {
  localStorage.setItem("dflash-theme", name);
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `Theme: ${name}`;
}

$("theme").addEventListener("click", () => {
  const now = localStorage.getItem("dflash-theme") ?? "auto";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
const kept = localStorage.getItem("dflash-theme");
theme(THEMES.includes(kept) ? kept : "auto");
if (apiKey()) $("key-label").hidden = false;
draw([new Passes()]);
introduce();
$("prompt").focus();
