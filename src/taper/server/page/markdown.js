// Markdown to elements. Text only ever becomes text nodes, so whatever a model writes is shown and never run.
// Each text node lies in a span that has the class and the title of its token.

const FENCE = /^\s*```/;
const HEADING = /^(#{1,6})\s+/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+/;
const QUOTE = /^>\s?/;
const RULE = /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/;
const LINK = /^\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

export function create(parent, name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// tokens: [{text, className, title}] whose texts joined are the source.
export function render(tokens) {
  const source = tokens.map((token) => token.text).join("");
  const root = document.createDocumentFragment();
  const emit = emitter(tokens);
  const lines = linesOf(source);
  for (let i = 0; i < lines.length; ) i = block(root, source, lines, i, emit);
  return root;
}

// A function that appends source[start, end) to a parent, token by token. Calls come in ascending order.
function emitter(tokens) {
  const ends = [];
  tokens.reduce((end, token) => (ends.push(end + token.text.length), end + token.text.length), 0);
  let index = 0;
  return (parent, start, end) => {
    while (index > 0 && ends[index - 1] > start) index -= 1;
    while (start < end) {
      while (ends[index] <= start) index += 1;
      const stop = Math.min(end, ends[index]);
      const token = tokens[index];
      const span = create(parent, "span", token.className);
      if (token.title) span.title = token.title;
      span.append(token.text.slice(start - ends[index], stop - ends[index] || undefined));
      start = stop;
    }
  };
}

function linesOf(source) {
  const lines = [];
  for (let start = 0; start <= source.length; ) {
    const newline = source.indexOf("\n", start);
    const next = newline < 0 ? source.length : newline;
    const text = source.slice(start, next).trimEnd(); // so that tints end with the text
    lines.push({ start, end: start + text.length, text });
    start = next + 1;
  }
  return lines;
}

// Renders the block that begins at line i; returns the index of the first line after it.
function block(root, source, lines, i, emit) {
  const line = lines[i];
  if (!line.text.trim()) return i + 1;
  if (FENCE.test(line.text)) {
    let last = i + 1;
    while (last < lines.length && !FENCE.test(lines[last].text)) last += 1;
    const code = create(create(root, "pre"), "code");
    if (last > i + 1) emit(code, lines[i + 1].start, lines[last - 1].end);
    return last + 1;
  }
  if (RULE.test(line.text)) {
    create(root, "hr");
    return i + 1;
  }
  const heading = HEADING.exec(line.text);
  if (heading) {
    inline(create(root, `h${Math.min(heading[1].length + 1, 4)}`), source, line.start + heading[0].length, line.end, emit);
    return i + 1;
  }
  if (ITEM.test(line.text)) return list(root, source, lines, i, emit);
  if (QUOTE.test(line.text)) {
    const quote = create(root, "blockquote");
    for (; i < lines.length && QUOTE.test(lines[i].text); i += 1) {
      inline(create(quote, "p"), source, lines[i].start + QUOTE.exec(lines[i].text)[0].length, lines[i].end, emit);
    }
    return i;
  }
  let last = i;
  while (last + 1 < lines.length && isParagraph(lines[last + 1].text)) last += 1;
  inline(create(root, "p"), source, line.start + line.text.search(/\S/), lines[last].end, emit);
  return last + 1;
}

function isParagraph(text) {
  return text.trim() && ![FENCE, HEADING, ITEM, QUOTE, RULE].some((pattern) => pattern.test(text));
}

function list(root, source, lines, i, emit) {
  const ordered = Boolean(ITEM.exec(lines[i].text)[1]);
  const parent = create(root, ordered ? "ol" : "ul");
  while (i < lines.length) {
    const match = ITEM.exec(lines[i].text);
    if (!match || Boolean(match[1]) !== ordered) break;
    let last = i;
    while (last + 1 < lines.length && isParagraph(lines[last + 1].text)) last += 1;
    const item = create(parent, "li");
    if (ordered) item.value = Number(match[1]);
    inline(item, source, lines[i].start + match[0].length, lines[last].end, emit);
    i = last + 1;
    while (i + 1 < lines.length && !lines[i].text.trim() && ITEM.test(lines[i + 1].text)) i += 1;
  }
  return i;
}

// Code, bold, italics and links in source[start, end).
function inline(parent, source, start, end, emit) {
  let plain = start;
  const flush = (until) => until > plain && emit(parent, plain, until);
  for (let i = start; i < end; ) {
    const [name, size] = mark(source, i);
    const close = name ? closing(source, source.slice(i, i + size), i + size, end) : -1;
    const link = source[i] === "[" ? LINK.exec(source.slice(i, end)) : null;
    if (close > 0) {
      flush(i);
      const element = create(parent, name);
      if (name === "code") emit(element, i + size, close);
      else inline(element, source, i + size, close, emit);
      i = plain = close + size;
    } else if (link) {
      flush(i);
      const element = create(parent, "a");
      Object.assign(element, { href: link[2], target: "_blank", rel: "noopener noreferrer" });
      emit(element, i + 1, i + 1 + link[1].length);
      i = plain = i + link[0].length;
    } else {
      i += Math.max(1, name ? size : 1);
    }
  }
  flush(end);
}

// The name of the element that a mark at i begins, and the length of the mark.
function mark(source, i) {
  if (source[i] === "`") return ["code", 1];
  if (source.startsWith("**", i) && /\S/.test(source[i + 2] ?? " ")) return ["strong", 2];
  if (source[i] === "*" && /[^\s*]/.test(source[i + 1] ?? " ")) return ["em", 1];
  return ["", 0];
}

// Where the mark that closes an element begins; -1 if there is none in its paragraph.
function closing(source, text, from, end) {
  const index = source.indexOf(text, from);
  const blank = source.indexOf("\n\n", from);
  return index > from && index + text.length <= end && (blank < 0 || index < blank) ? index : -1;
}
