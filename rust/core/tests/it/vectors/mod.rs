// SPDX-License-Identifier: Apache-2.0
//! Owns the golden vectors: builds every file of `tests/vectors` with the data plane and compares
//! it with what is committed.

mod invalidate_cases;
mod pool_cases;
mod resolve_cases;

use std::fmt::Write;
use std::path::PathBuf;

use serde_json::{Value, json};

const WRITE: &str = "HOTPAGE_WRITE_VECTORS";
const MAX_BYTES: usize = 200_000;

/// Objects and tables go over several lines, rows of numbers stay on one, so that a changed case
/// shows as a small difference.
fn write_value(value: &Value, indent: usize, text: &mut String) {
    let compact = value.to_string();
    let is_row =
        value.as_array().is_some_and(|a| a.iter().all(|v| !v.is_array() && !v.is_object()));
    if is_row || compact.len() + indent <= 100 {
        text.push_str(&compact);
        return;
    }
    let pad = " ".repeat(indent + 1);
    let children: Vec<(String, &Value)> = match value {
        Value::Array(values) => values.iter().map(|v| (String::new(), v)).collect(),
        Value::Object(map) => map.iter().map(|(k, v)| (format!("\"{k}\": "), v)).collect(),
        _ => Vec::new(),
    };
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    text.push(open);
    for (i, (key, child)) in children.into_iter().enumerate() {
        write!(text, "{}\n{pad}{key}", if i == 0 { "" } else { "," }).unwrap();
        write_value(child, indent + 1, text);
    }
    write!(text, "\n{}{close}", " ".repeat(indent)).unwrap();
}

fn check_file(name: &str, cases: &[Value]) {
    let mut text = String::new();
    write_value(&json!({ "schema": 1, "cases": cases }), 0, &mut text);
    text.push('\n');
    assert!(text.len() < MAX_BYTES, "{name} has {} bytes, expected under {MAX_BYTES}", text.len());
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors").join(name);
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let first = text.lines().zip(committed.lines()).position(|(ours, theirs)| ours != theirs);
    assert!(
        text == committed,
        "tests/vectors/{name} is not what the data plane writes (first difference in line {}); \
         to rewrite it: {WRITE}=1 cargo test -p hotpage-core --test it vectors",
        first.unwrap_or_else(|| text.lines().count().min(committed.lines().count())) + 1
    );
}

/// A table as rows of `width`.
fn table<T: Copy + Into<i64>>(values: &[T], width: usize) -> Value {
    let rows = values.chunks_exact(width).map(|row| row.iter().map(|&v| v.into()).collect());
    Value::from(rows.collect::<Vec<Vec<i64>>>())
}

#[test]
fn resolve_json_is_what_the_data_plane_writes() {
    check_file("resolve.json", &resolve_cases::all());
}

#[test]
fn copy_json_is_what_the_data_plane_writes() {
    check_file("copy.json", &pool_cases::copies());
}

#[test]
fn mirror_json_is_what_the_data_plane_writes() {
    check_file("mirror.json", &pool_cases::mirrors());
}

#[test]
fn pages_json_is_what_the_data_plane_writes() {
    check_file("pages.json", &pool_cases::pages());
}

#[test]
fn invalidate_json_is_what_the_data_plane_writes() {
    check_file("invalidate.json", &invalidate_cases::all());
}
