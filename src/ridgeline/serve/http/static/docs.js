// Show the endpoints and their fields from openapi.json.

import { ask } from './api.js';
import { byId, make, table } from './dom.js';
import { apply, stored } from './theme.js';

const COLUMNS = ['Field', 'Type', 'Required', 'Limits'];
const LARGEST = 2 ** 53; // larger limits come from 64-bit integers and are not shown
const LIMITS = { minimum: 'from', maximum: 'to', exclusiveMaximum: 'below', minLength: 'at least', maxLength: 'at most', maxItems: 'at most' };

async function begin() {
  try {
    show(await (await ask('openapi.json')).json());
  } catch (error) {
    byId('notice').hidden = false;
    byId('notice').textContent = `${error.message} ${error.advice ?? ''}`.trim();
  }
}

function show({ info, paths, components }) {
  byId('model').textContent = `Version ${info.version}`;
  byId('about').textContent = info.description;
  const schemas = components?.schemas ?? {}, groups = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? 'Server';
      groups.set(tag, [...(groups.get(tag) ?? []), endpoint(path, method, operation, schemas)]);
    }
  }
  byId('endpoints').replaceChildren(...[...groups].map(([tag, nodes]) => make('section', {}, make('h2', {}, tag), nodes)));
}

function endpoint(path, method, operation, schemas) {
  const title = `${method.toUpperCase()} ${path}`;
  const node = make('article', { class: 'answer endpoint', 'aria-label': title },
    make('header', {}, make('h3', {}, make('code', {}, title))), make('p', {}, operation.description ?? ''));
  const body = operation.requestBody?.content?.['application/json']?.schema;
  if (body) node.append(make('details', {}, make('summary', {}, 'Fields'), ...fields(title, body, schemas, new Set())));
  return node;
}

// A table of an object's fields, and one for each object type in it that was not shown yet.
function fields(title, given, schemas, told) {
  const schema = resolved(given, schemas), names = references(schema.properties ?? {}).filter((name) => !told.has(name));
  names.forEach((name) => told.add(name));
  const required = new Set(schema.required ?? []);
  const properties = Object.entries(schema.properties ?? {}), isRequired = ([name]) => required.has(name);
  const inOrder = [...properties.filter(isRequired), ...properties.filter((one) => !isRequired(one))];
  const rows = inOrder.map(([name, one]) =>
    [make('code', {}, name), type(one), required.has(name) ? 'yes' : '', limits(one)]);
  const more = names.filter((name) => schemas[name]?.properties).flatMap((name) =>
    [make('h4', {}, name), make('p', {}, schemas[name].description ?? ''), ...fields(name, schemas[name], schemas, told)]);
  return [table(`Fields of ${title}`, COLUMNS, rows), ...more];
}

const named = (reference) => reference.split('/').pop();
const resolved = (schema, schemas) => (schema.$ref ? schemas[named(schema.$ref)] ?? {} : schema);
const parts = (schema) => schema.anyOf ?? schema.oneOf ?? [];

function references(schema) {
  if (typeof schema !== 'object' || schema === null) return [];
  return [...new Set(Object.entries(schema).flatMap(([key, value]) => (key === '$ref' ? [named(value)] : references(value))))];
}

function type(schema) {
  if (schema.$ref) return named(schema.$ref);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' or ');
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (parts(schema).length) return parts(schema).filter((one) => one.type !== 'null').map(type).join(' or ');
  if (schema.type === 'array') return `list of ${type(schema.items ?? {})}`;
  return schema.type ?? 'anything';
}

function limits(schema) {
  const own = Object.entries(LIMITS).filter(([key]) => Math.abs(schema[key]) < LARGEST).map(([key, word]) => `${word} ${schema[key]}`);
  return [...new Set([...own, ...parts(schema).map(limits)])].filter(Boolean).join(', ');
}

apply(stored());
begin();
