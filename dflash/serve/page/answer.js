// One turn on the page: the question, and one or two answers beside each other.

import { originOf } from "./passes.js";

const TITLES = {
  draft: "accepted draft",
  target: "the target's own token",
  fallback: "a plain step",
};

export function question(text) {
  const place = document.createElement("p");
  place.className = "question";
  place.textContent = text;
  return place;
}

export class Answer {
  // `name` is a heading, shown where there are two answers; `plain` leaves the text uncoloured.
  constructor(name, plain = false) {
    this.isPlain = plain;
    this.element = document.createElement("article");
    this.element.className = "answer";
    this.element.setAttribute("aria-label", name);
    this.heading = document.createElement("h3");
    this.heading.textContent = name;
    this.text = document.createElement("p");
    this.text.className = "text";
    this.foot = document.createElement("p");
    this.foot.className = "foot";
    this.element.append(this.heading, this.text, this.foot);
    this.content = ""; // as the server has it: reasoning left out
    this.passes = 0;
  }

  begin() {
    this.element.classList.add("running");
  }

  // The text of one pass, each piece coloured by who made it.
  add(pieces, pass) {
    if (pass) this.passes += 1;
    for (const piece of pieces) {
      if (!piece.text) continue;
      const origin = originOf(piece.source, pass ?? { drafted: 1 });
      const part = document.createElement("span");
      part.className = this.isPlain ? "plain" : origin;
      part.title = pass ? `${TITLES[origin]}, pass ${this.passes}` : TITLES[origin];
      part.textContent = piece.text;
      this.text.append(part);
    }
  }

  end(words) {
    this.element.classList.remove("running");
    this.foot.textContent = words;
  }

  fail(words) {
    this.element.classList.add("failed");
    this.end(words);
  }

  // The verdict beside the figures.
  badge(words, good) {
    const mark = document.createElement("span");
    mark.className = good ? "badge same" : "badge other";
    mark.textContent = words;
    this.foot.prepend(mark, " ");
  }
}

export function turn(text, answers) {
  const place = document.createElement("section");
  place.className = answers.length > 1 ? "turn two" : "turn";
  const beside = document.createElement("div");
  beside.className = "answers";
  beside.append(...answers.map((answer) => answer.element));
  place.append(question(text), beside);
  return place;
}
