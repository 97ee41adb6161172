// The logged data of one run. Numbers are loaded all at once, and texts in chunks.

const FLAG = { correct: 1, truncated: 2, flipped: 4, trained: 8, leftOut: 16 };
const CHUNKS_KEPT = 16;
const ARRAYS = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };
const ABSENT = 0xffff;

/** Loads chunks of text, and keeps the most recently used chunks. */
class Chunks {
  constructor(name) {
    this.name = name;
    this.kept = new Map();
    this.opened = 0;
  }

  get(number) {
    if (!this.kept.has(number)) {
      this.opened += 1;
      const asked = unpack(`${this.name}-${number}`).then((packed) => packed.json());
      asked.catch(() => this.kept.delete(number));  // the next request tries again
      this.kept.set(number, asked);
    }
    const found = this.kept.get(number);
    this.kept.delete(number);
    this.kept.set(number, found);
    if (this.kept.size > CHUNKS_KEPT) this.kept.delete(this.kept.keys().next().value);
    return found;
  }
}

/** The rollouts of one run. */
class Store {
  constructor(run) {
    this.run = run;
    this.about = run.rollouts;
    this.chunks = new Chunks(`chunk-${run.number}`);
  }

  /** Loads the index if it is not loaded yet. */
  async open() {
    const { about } = this;
    if (this.read === about) return this;
    const packed = await unpack(`index-${this.run.number}`);
    const content = await packed.arrayBuffer();
    const columns = {};
    let place = 0;
    for (const [name, kind, length] of about.columns) {
      columns[name] = new ARRAYS[kind](content, place, length);
      place += length * ARRAYS[kind].BYTES_PER_ELEMENT;
    }
    this.read = about;
    this.columns = columns;
    this.groups = columns.group_step.length;
    this.rollouts = columns.flags.length;
    this.asked = this.sides = null;
    this.ranges = new Map();
    return this;
  }

  first(group) {
    return this.columns.group_first[group];
  }

  end(group) {
    return group + 1 < this.groups ? this.columns.group_first[group + 1] : this.rollouts;
  }

  size(group) {
    return this.end(group) - this.first(group);
  }

  correct(group) {
    let count = 0;
    for (let i = this.first(group); i < this.end(group); i += 1) count += this.columns.flags[i] & FLAG.correct;
    return count;
  }

  /** Returns the mean of a group's known rewards, or NaN if no reward is known. */
  reward(group) {
    const known = this.columns.reward.subarray(this.first(group), this.end(group)).filter((value) => !Number.isNaN(value));
    return known.reduce((sum, value) => sum + value, 0) / known.length;
  }

  /** Returns the [lowest, highest] reward at a step, or at all steps if `step` is null. */
  rewards(step = null) {
    if (!this.ranges.has(step)) {
      const { group_step: steps, reward } = this.columns;
      const groups = Array.from(steps, (_, group) => group).filter((group) => step === null || steps[group] === step);
      this.ranges.set(step, extent(groups.flatMap((group) => Array.from(reward.subarray(this.first(group), this.end(group))))));
    }
    return this.ranges.get(step);
  }

  /** Returns 1 if a response's reward is above the mean of its group, -1 if it is below, and 0 if it is equal or unknown. */
  side(i) {
    if (!this.sides) {
      this.sides = new Int8Array(this.rollouts);
      for (let group = 0; group < this.groups; group += 1) {
        const mean = this.reward(group);
        const least = 1e-6 * Math.max(1, Math.abs(mean));  // the rounding error
        for (let k = this.first(group); k < this.end(group); k += 1) {
          const more = this.columns.reward[k] - mean;
          this.sides[k] = more > least ? 1 : more < -least ? -1 : 0;
        }
      }
    }
    return this.sides[i];
  }

  /** Returns the result of a group as text. */
  outcome(group) {
    if (this.run.by_score) return `mean reward ${figure(this.reward(group))}`;
    return `${this.correct(group)} of ${this.size(group)} correct`;
  }

  head(group) {
    return this.read.heads[this.columns.group_question[group]];
  }

  /** Returns the question key of a group, which is the same in all runs for the same prompt and answer. */
  key(group) {
    return this.read.keys[this.columns.group_question[group]];
  }

  /** Returns the group of a step with a prompt's ordinal, or -1. */
  at(step, ordinal) {
    const { group_step: steps, group_ordinal: ordinals } = this.columns;
    return steps.findIndex((each, group) => each === Number(step) && ordinals[group] === Number(ordinal));
  }

  /** Returns the groups of a question in step order. */
  groupsOf(key) {
    if (!this.asked) {
      this.asked = new Map(this.read.keys.map((each) => [each, []]));
      for (let group = 0; group < this.groups; group += 1) this.asked.get(this.key(group)).push(group);
    }
    return this.asked.get(key) ?? [];
  }

  /** Returns the texts of a group: {prompt, answer, responses}. */
  async texts(group) {
    const chunk = await this.chunk(this.columns.group_chunk[group]);
    return chunk[this.columns.group_place[group]];
  }

  /** Returns all groups of a chunk. */
  chunk(number) {
    return this.chunks.get(number);
  }
}

/** The evaluations of one run. Each dataset has its problems and arrays [evaluations, problems] with the numbers of correct responses
 * and of samples and, if the run is judged by scores, the mean rewards. */
class ProblemStore {
  constructor(run) {
    this.run = run;
    this.about = run.evaluations;
    this.chunks = new Chunks(`eval-${run.number}`);
  }

  async open() {
    const { about } = this;
    if (this.read === about) return this;
    const packed = await unpack(`eval-index-${this.run.number}`);
    const content = await packed.arrayBuffer();
    let from = 0;
    const take = (Kind, size) => {
      const found = new Kind(content, from, size);
      from += found.byteLength;
      return found;
    };
    this.datasets = new Map(
      about.datasets.map((said) => {
        const size = said.evaluations.length * said.keys.length;
        const dataset = { ...said, correct: take(Uint16Array, size), samples: take(Uint16Array, size) };
        if (this.run.by_score) {
          dataset.rewards = take(Float32Array, size);
          dataset.range = extent(dataset.rewards);
        }
        dataset.steps = said.evaluations.map(([step]) => step);
        dataset.places = new Map(said.keys.map((key, place) => [key, place]));
        return [said.name, dataset];
      }),
    );
    this.read = about;
    return this;
  }

  /** Returns [correct, samples] of a problem in an evaluation, or null if the evaluation did not include the problem. */
  score(dataset, evaluation, place) {
    const at = evaluation * dataset.keys.length + place;
    return dataset.samples[at] === ABSENT ? null : [dataset.correct[at], dataset.samples[at]];
  }

  /** Returns the share of correct responses to a problem, or their mean reward. Returns null if it is unknown. */
  worth(dataset, evaluation, place) {
    const score = this.score(dataset, evaluation, place);
    if (!score) return null;
    if (!this.run.by_score) return score[0] / Math.max(1, score[1]);
    const reward = dataset.rewards[evaluation * dataset.keys.length + place];
    return Number.isNaN(reward) ? null : reward;
  }

  /** Returns `worth` as the height of a bar, from 0 to 1. Rewards are relative to the dataset's lowest and highest reward. */
  level(dataset, evaluation, place) {
    const worth = this.worth(dataset, evaluation, place);
    return this.run.by_score ? levelOf(worth, dataset.range) : worth;
  }

  /** Returns the result of a problem as text. */
  outcome(dataset, evaluation, place) {
    if (this.run.by_score) return `mean reward ${figure(this.worth(dataset, evaluation, place))}`;
    const [right, of] = this.score(dataset, evaluation, place);
    return `${right} of ${of} correct`;
  }

  /** Returns [prompt, answer, position in the file] of a problem. */
  async text(dataset, place) {
    let first = 0;
    for (const [chunk, count] of dataset.texts) {
      if (place < first + count) return (await this.chunks.get(chunk))[place - first];
      first += count;
    }
    return null;
  }

  /** Returns the results of an evaluation, {extracted, responses}, by problem index. */
  records(dataset, evaluation) {
    return this.chunks.get(dataset.evaluations[evaluation][1]);
  }

  /** Returns the [dataset name, problem index] of a question, or null. */
  find(key) {
    for (const dataset of this.datasets.values()) {
      if (dataset.places.has(key)) return [dataset.name, dataset.places.get(key)];
    }
    return null;
  }
}
