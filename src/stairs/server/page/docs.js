// The API as a page, from /openapi.json; no library and no network but this server.

const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text ?? "" });

function resolve(schema, all) {
  return schema?.$ref ? all[schema.$ref.split("/").pop()] : schema;
}

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const many = schema.anyOf ?? schema.oneOf;
  if (many) return [...new Set(many.map(typeOf))].filter((name) => name !== "null").join(" | ");
  const name = schema.type === "array" ? `list of ${typeOf(schema.items) || "anything"}` : schema.type;
  const low = schema.minimum, high = schema.maximum;
  const told = low !== undefined && high < 1e6; // larger bounds are no news
  return told ? `${name}, ${low} to ${high}` : name ?? "anything";
}

function fields(schema) {
  const table = make("table");
  const head = table.createTHead().insertRow();
  for (const word of ["Field", "Type", ""]) head.append(make("th", word));
  const body = table.createTBody();
  for (const [name, part] of Object.entries(schema.properties ?? {})) {
    const row = body.insertRow();
    row.insertCell().append(make("code", name));
    row.insertCell().textContent = typeOf(part);
    const required = schema.required?.includes(name);
    const fallback = part.default ?? undefined;
    row.insertCell().textContent = required
      ? "required"
      : fallback === undefined ? "" : `default ${JSON.stringify(fallback)}`;
  }
  return table;
}

const spec = await (await fetch("/openapi.json")).json();
const all = spec.components.schemas, page = document.getElementById("reference");
for (const [path, operations] of Object.entries(spec.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const title = make("h2");
    title.append(make("b", method.toUpperCase()), ` ${path}`);
    page.append(title, make("p", operation.description));
    const body = resolve(operation.requestBody?.content["application/json"].schema, all);
    if (body) page.append(fields(body));
    const reply = operation.responses["200"]?.content?.["application/json"]?.schema;
    if (reply) page.append(make("p", `Answers with ${typeOf(reply)}.`));
  }
}
page.append(make("h2", "Objects"));
for (const [name, schema] of Object.entries(all)) {
  if (!schema.properties) continue;
  const title = make("h2", name);
  page.append(title);
  if (schema.description) page.append(make("p", schema.description));
  page.append(fields(schema));
}
