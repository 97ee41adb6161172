// The rollouts of one run: numbers of all of them at once, texts by the chunk.

const FLAG = { correct: 1, truncated: 2, flipped: 4, trained: 8, leftOut: 16 };
const CHUNKS_KEPT = 16;
const ARRAYS = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };

class Store {
  constructor(run) {
    this.run = run;
    this.about = run.rollouts;
    this.kept = new Map();
    this.opened = 0;
  }

  /** Reads the index. */
  async open() {
    if (this.columns) return this;
    const content = await unpack(`index-${this.run.number}`).arrayBuffer();
    const columns = {};
    let place = 0;
    for (const [name, kind, length] of this.about.columns) {
      columns[name] = new ARRAYS[kind](content, place, length);
      place += length * ARRAYS[kind].BYTES_PER_ELEMENT;
    }
    this.columns = columns;
    this.groups = columns.group_step.length;
    this.rollouts = columns.flags.length;
    return this;
  }

  first(group) {
    return this.columns.group_first[group];
  }

  end(group) {
    return group + 1 < this.groups ? this.columns.group_first[group + 1] : this.rollouts;
  }

  correct(group) {
    let count = 0;
    for (let i = this.first(group); i < this.end(group); i += 1) count += this.columns.flags[i] & FLAG.correct;
    return count;
  }

  head(group) {
    return this.about.heads[this.columns.group_question[group]];
  }

  /** The texts of a group: {prompt, answer, responses}. */
  async texts(group) {
    const chunk = await this.chunk(this.columns.group_chunk[group]);
    return chunk[this.columns.group_place[group]];
  }

  /** All groups of a chunk; the last ones that were asked for are kept. */
  chunk(number) {
    if (!this.kept.has(number)) {
      this.opened += 1;
      this.kept.set(number, unpack(`chunk-${this.run.number}-${number}`).json());
    }
    const found = this.kept.get(number);
    this.kept.delete(number);
    this.kept.set(number, found);
    if (this.kept.size > CHUNKS_KEPT) this.kept.delete(this.kept.keys().next().value);
    return found;
  }
}
