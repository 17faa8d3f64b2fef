// An answer as a list of passes, and the figures that follow from it. No document, no network.

// Who made a token: an accepted draft, the target in a pass that checked drafts, or a plain step.
export function originOf(source, pass) {
  if (source === "draft") return "draft";
  return pass.drafted || pass.first ? "target" : "fallback";
}

export class Passes {
  constructor() {
    this.list = [];
    this.ids = [];
    this.counts = { draft: 0, target: 0, fallback: 0 };
    this.tokensPerSecond = null;
    this.speedup = null;
    this.finish = null;
  }

  // Takes in one frame's `origins`, read at `now` milliseconds; the pass, or null for an empty one.
  add(origins, now) {
    if (!origins.committed) return null;
    const pass = {
      first: this.list.length === 0,
      drafted: origins.drafted,
      accepted: origins.accepted,
      committed: origins.committed,
      block: origins.drafted + 1,
      at: now,
    };
    this.list.push(pass);
    this.ids.push(...origins.token_ids);
    for (const source of origins.sources) this.counts[originOf(source, pass)] += 1;
    return pass;
  }

  // The server's own figures, from the last frame.
  close(metrics, finish) {
    this.finish = finish ?? this.finish;
    if (this.rounds.length) this.tokensPerSecond = metrics?.tokens_per_second ?? null;
    this.speedup = metrics?.speculative_decoding?.speedup ?? null;
  }

  // Passes after the prefill.
  get rounds() {
    return this.list.slice(1);
  }

  get tokens() {
    return this.ids.length;
  }

  // Tokens a second after the first pass: the server's figure once there is one.
  get rate() {
    if (this.tokensPerSecond) return this.tokensPerSecond;
    const rounds = this.rounds;
    if (!rounds.length) return null;
    const seconds = (rounds.at(-1).at - this.list[0].at) / 1000;
    const made = rounds.reduce((sum, pass) => sum + pass.committed, 0);
    return seconds > 0 ? made / seconds : null;
  }

  get meanCommitted() {
    const rounds = this.rounds;
    if (!rounds.length) return null;
    return rounds.reduce((sum, pass) => sum + pass.committed, 0) / rounds.length;
  }

  get acceptanceRate() {
    const drafted = this.list.reduce((sum, pass) => sum + pass.drafted, 0);
    return drafted ? this.list.reduce((sum, pass) => sum + pass.accepted, 0) / drafted : null;
  }

  // For draft 1, 2, ...: passes that had one there, and passes that kept it.
  get positions() {
    const most = this.list.reduce((top, pass) => Math.max(top, pass.drafted), 0);
    return Array.from({ length: most }, (_, i) => ({
      judged: this.list.filter((pass) => pass.drafted > i).length,
      kept: this.list.filter((pass) => pass.accepted > i).length,
    }));
  }
}

// Where two texts part, as an index of tokens; null = they are the same.
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i += 1) if (one[i] !== other[i]) return i;
  return null;
}
