"use strict";
// Shows /openapi.json as a page; everything is set as text.

function make(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function example(path, method, operation) {
  const at = `${location.origin}${path.replace("{id}", "ID")}`;
  const body = operation.requestBody ? Object.keys(operation.requestBody.content) : [];
  if (path === "/api/teach") return `curl -F class=mug -F image=@mug1.jpg -F image=@mug2.jpg ${at}`;
  if (body.includes("image/*")) return `curl --data-binary @picture.jpg ${at}\ncurl -F image=@one.jpg -F image=@two.jpg ${at}`;
  return method === "get" ? `curl ${at}` : `curl -X ${method.toUpperCase()} ${at}`;
}

// Follow references, so that an answer can be read without looking elsewhere.
function expanded(schema, document, depth = 0) {
  if (schema.$ref) return depth > 6 ? schema.$ref.split("/").pop() : expanded(document.components.schemas[schema.$ref.split("/").pop()], document, depth + 1);
  if (schema.anyOf) return schema.anyOf.map((each) => expanded(each, document, depth + 1));
  if (schema.type === "object" && schema.properties) return Object.fromEntries(Object.entries(schema.properties).map(([name, inner]) => [name, expanded(inner, document, depth + 1)]));
  if (schema.type === "array") return [expanded(schema.items, document, depth + 1)];
  const kind = Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type || "anything";
  return schema.enum ? schema.enum.join(" | ") : schema.description ? `${kind}: ${schema.description}` : kind;
}

async function show() {
  const document_ = await (await fetch("/openapi.json")).json();
  const sections = [];
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const parameters = (operation.parameters || []).map((each) => make("li", "", make("code", "", each.name), ` (${each.in}): ${each.description}`));
      const answers = Object.entries(operation.responses).map(([status, response]) => make("li", "", make("code", "", status), ` ${response.description}`));
      const good = Object.values(operation.responses)[0].content;
      const schema = good && good["application/json"] ? expanded(good["application/json"].schema, document_) : null;
      sections.push(make("section", "panel",
        make("h2", "", make("span", `method ${method}`, method.toUpperCase()), make("code", "", path)),
        make("p", "", operation.summary + "."),
        operation.description ? make("p", "quiet", operation.description) : null,
        parameters.length ? make("ul", "", ...parameters) : null,
        make("pre", "", example(path, method, operation)),
        make("ul", "quiet", ...answers),
        schema && typeof schema === "object" ? make("details", "", make("summary", "", "Answer"), make("pre", "", JSON.stringify(schema, null, 1))) : null));
    }
  }
  document.getElementById("operations").replaceChildren(...sections);
}

show().catch(() => { document.getElementById("operations").textContent = "openapi.json cannot be read."; });
