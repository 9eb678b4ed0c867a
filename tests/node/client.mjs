// A small client for the kvfold worker: msgpack or frames on the wire.
import { decode, encode } from "@msgpack/msgpack";

export const MSGPACK = "application/msgpack";
export const FRAME = "application/vnd.kvfold.frame";

const MAGIC = [0x4b, 0x56, 0x46, 0x31]; // "KVF1"
const PREFIX_BYTES = 12; // magic, u16 version, u16 flags, u32 header bytes
const ALIGNMENT = 64;

const align = (n) => Math.ceil(n / ALIGNMENT) * ALIGNMENT;

export class KvfoldError extends Error {
  constructor(status, { code, message, retryable, details }) {
    super(`${status} ${code}: ${message}`);
    Object.assign(this, { status, code, retryable, details });
  }
}

/** A wire tensor over a typed array (the host is taken to be little endian). */
export function tensor(dtype, shape, array) {
  return { dtype, shape, data: new Uint8Array(array.buffer, array.byteOffset, array.byteLength) };
}

/** A copy of `value` in which every object that `matches` is replaced. */
function replace(value, matches, replacement) {
  const again = (item) => replace(item, matches, replacement);
  if (Array.isArray(value)) return value.map(again);
  if (value === null || typeof value !== "object" || value instanceof Uint8Array) return value;
  if (matches(value)) return replacement(value);
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, again(item)]));
}

export function encodeFrame(body) {
  const placed = [];
  const layOut = (start) => {
    let end = start;
    placed.length = 0;
    const header = replace(body, (item) => item.data instanceof Uint8Array, ({ data, ...rest }) => {
      const offset = align(end);
      end = offset + data.length;
      placed.push({ offset, data });
      return { ...rest, offset, nbytes: data.length };
    });
    return { header: encode(header), end };
  };

  // Offsets count from the start of the frame and are part of the header, whose size moves them.
  let start = align(PREFIX_BYTES);
  let laid = layOut(start);
  while (align(PREFIX_BYTES + laid.header.length) !== start) {
    start = align(PREFIX_BYTES + laid.header.length);
    laid = layOut(start);
  }

  const frame = new Uint8Array(laid.end);
  const view = new DataView(frame.buffer);
  frame.set(MAGIC);
  view.setUint16(4, 1, true);
  view.setUint16(6, 0, true);
  view.setUint32(8, laid.header.length, true);
  frame.set(laid.header, PREFIX_BYTES);
  for (const { offset, data } of placed) frame.set(data, offset);
  return frame;
}

export function decodeFrame(frame) {
  const view = new DataView(frame.buffer, frame.byteOffset, frame.byteLength);
  if (!MAGIC.every((byte, i) => frame[i] === byte)) throw new Error("not a frame");
  if (view.getUint16(4, true) !== 1 || view.getUint16(6, true) !== 0) throw new Error("unknown frame version or flags");
  const header = decode(frame.subarray(PREFIX_BYTES, PREFIX_BYTES + view.getUint32(8, true)));
  return replace(header, (item) => "offset" in item && "nbytes" in item, ({ offset, nbytes, ...rest }) => {
    if (offset % ALIGNMENT !== 0 || offset + nbytes > frame.length) throw new Error("a tensor outside its frame");
    return { ...rest, data: frame.subarray(offset, offset + nbytes) };
  });
}

function decodeReply(bytes, contentType) {
  const type = contentType.split(";")[0].trim();
  if (type === FRAME) return decodeFrame(bytes);
  if (type === MSGPACK) return decode(bytes);
  if (type === "application/json") return JSON.parse(new TextDecoder().decode(bytes));
  throw new Error(`a reply of type ${contentType}`);
}

export class Client {
  constructor(baseUrl, encoding = MSGPACK) {
    this.baseUrl = baseUrl;
    this.encoding = encoding;
  }

  encode(body) {
    return this.encoding === FRAME ? encodeFrame(body) : encode(body);
  }

  /** Sends bytes already encoded; an error reply is thrown as a KvfoldError. */
  async send(method, path, bytes, accept = this.encoding) {
    const headers = { Accept: accept };
    if (bytes !== undefined) headers["Content-Type"] = this.encoding;
    const response = await fetch(this.baseUrl + path, { method, headers, body: bytes });
    const reply = new Uint8Array(await response.arrayBuffer());
    if (response.status === 204) return undefined;
    const type = response.headers.get("Content-Type") ?? "";
    const body = decodeReply(reply, type);
    if (!response.ok) throw new KvfoldError(response.status, body);
    if (!type.startsWith(accept)) throw new Error(`asked for ${accept}, got ${type}`);
    return body;
  }

  manifest() {
    return this.send("GET", "/v1/manifest", undefined, "application/json");
  }

  /** One request's step; `tensors` maps compressor names to wire tensors of `numTokens` rows. */
  stepBody(stepId, id, start, numTokens, tensors) {
    const positions = Int32Array.from({ length: numTokens }, (_, i) => start + i);
    return {
      version: 1,
      step_id: stepId,
      requests: [{ id, start, num_tokens: numTokens }],
      query_start_loc: [0, numTokens],
      positions: tensor("int32", [numTokens], positions),
      tensors: Object.entries(tensors).map(([compressor, rows]) => ({ compressor, ...rows })),
    };
  }

  step(...args) {
    return this.send("POST", "/v1/step", this.encode(this.stepBody(...args)));
  }

  async readPages(handles) {
    const reply = await this.send("POST", "/v1/pages/read", this.encode({ version: 1, handles }));
    return reply.pages;
  }

  getRequest(id) {
    return this.send("GET", `/v1/requests/${encodeURIComponent(id)}`);
  }

  release(id) {
    return this.send("DELETE", `/v1/requests/${encodeURIComponent(id)}`);
  }
}
