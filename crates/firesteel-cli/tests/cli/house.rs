//! The project's own rules.

use crate::support::ROOT;
use firesteel_checkpoint::Family;
use std::path::Path;

fn crates() -> Vec<String> {
    let folder = std::fs::read_dir(Path::new(ROOT).join("crates")).unwrap();
    let mut names: Vec<String> =
        folder.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn architecture() -> String {
    std::fs::read_to_string(Path::new(ROOT).join("ARCHITECTURE.md")).unwrap()
}

/// A row of the table of crates.
struct Entry {
    name: String,
    /// The other cells.
    cells: Vec<String>,
}

/// The table of crates, in its order.
fn entries() -> Vec<Entry> {
    let text = architecture();
    let rows = text.lines().filter(|line| line.starts_with("| firesteel-"));
    let entry = |row: &str| {
        let mut cells = row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
        Entry { name: cells.next().unwrap(), cells: cells.collect() }
    };
    rows.map(entry).collect()
}

#[test]
fn every_crate_has_its_entry_and_no_other_is_there() {
    let mut names: Vec<String> = entries().into_iter().map(|entry| entry.name).collect();
    names.sort();
    assert_eq!(names, crates());
}

/// The page is one that is read in a minute; what is longer is told in the crate.
#[test]
fn no_entry_has_more_than_sixty_words() {
    for Entry { name, cells } in entries() {
        assert_eq!(cells.len(), 3, "{name}: takes → gives, main type and file, is not");
        let words = cells.iter().flat_map(|cell| cell.split_whitespace()).count();
        assert!(words <= 60, "{name} has {words} words; tell it in the crate's lib.rs");
    }
}

/// What is marked as code in a line.
fn marked(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

fn is_path(word: &str) -> bool {
    !word.contains(' ') && (word.contains('/') || word.ends_with(".rs") || word.ends_with(".md"))
}

#[test]
fn main_types_are_in_the_files_that_are_named() {
    for Entry { name, cells } in entries() {
        let folder = Path::new(ROOT).join("crates").join(&name).join("src");
        let (files, names): (Vec<&str>, Vec<&str>) =
            marked(&cells[1]).partition(|word| is_path(word));
        assert!(!files.is_empty() && !names.is_empty(), "{name} has no main type and file");
        let read = |file: &&str| {
            let file = folder.join(file);
            std::fs::read_to_string(&file).unwrap_or_else(|_| panic!("no {}", file.display()))
        };
        let text: String = files.iter().map(read).collect();
        for item in names {
            let kinds = ["struct", "enum", "trait", "fn"];
            let defined = |kind: &str| {
                let start = format!("{kind} {item}");
                let mut rests = text.split(&start).skip(1);
                rests.any(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
            };
            assert!(kinds.into_iter().any(defined), "{name}: no {item} in {files:?}");
        }
    }
}

#[test]
fn the_page_names_only_files_that_are_there() {
    let text = architecture();
    let is_entry = |line: &&str| line.starts_with("| firesteel-");
    let words = text.lines().filter(|line| !is_entry(line)).flat_map(marked);
    for path in words.filter(|word| is_path(word)) {
        let root = Path::new(ROOT);
        let there = root.join(path).exists() || root.join("crates").join(path).exists();
        assert!(there, "ARCHITECTURE.md names {path}, which is not there");
    }
}

#[test]
fn crates_depend_only_on_crates_above_them() {
    let order: Vec<String> = entries().into_iter().map(|entry| entry.name).collect();
    for name in crates() {
        let manifest = Path::new(ROOT).join("crates").join(&name).join("Cargo.toml");
        let text = std::fs::read_to_string(manifest).unwrap();
        let own = text.split("[dependencies]").nth(1).unwrap().split("\n[").next().unwrap();
        let place = order.iter().position(|other| *other == name).unwrap();
        for line in own.lines().filter(|line| line.starts_with("firesteel-")) {
            let dependency = line.split(['.', ' ', '=']).next().unwrap();
            let above = order.iter().position(|other| other == dependency).unwrap();
            assert!(above < place, "{name} depends on {dependency}, which is below it");
        }
    }
}

/// Files of Rust below a folder.
fn sources(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A crate that is not built for tests has none, or they would never run.
#[test]
fn tests_beside_the_code_are_run() {
    for name in crates() {
        let folder = Path::new(ROOT).join("crates").join(&name);
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let mut found = Vec::new();
        sources(&folder.join("src"), &mut found);
        let text: String =
            found.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
        let in_documentation = ["/// ```\n", "//! ```\n"].iter().any(|line| text.contains(line));
        for (setting, has) in
            [("\ntest = false", text.contains("#[test]")), ("\ndoctest = false", in_documentation)]
        {
            assert!(!(has && manifest.contains(setting)), "{name}: remove {:?}", setting.trim());
        }
    }
}

/// A family is a description: what it is called stands in the folders of descriptions alone, and
/// neither a type nor a branch of the program is made for it. Comments, tests and what they share may
/// name one.
#[test]
fn no_source_file_names_a_family_but_its_description() {
    let mut names: Vec<String> = Vec::new();
    for family in Family::all() {
        for name in [family.model_type(), family.architecture(), family.name()] {
            // The name without its version.
            let end = name.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(name.len());
            names.push(name[..end].to_ascii_lowercase());
        }
    }
    assert!(names.iter().all(|name| name.len() >= 4), "{names:?}");
    let mut found = Vec::new();
    for name in crates().into_iter().filter(|name| name != "firesteel-testing") {
        sources(&Path::new(ROOT).join("crates").join(name).join("src"), &mut found);
    }
    let mut failures = Vec::new();
    for path in found {
        let description = |folder: &str| path.iter().any(|part| part == folder);
        if description("family") || description("syntax") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for (number, line) in code.lines().enumerate() {
            let lower = line.trim_start().to_ascii_lowercase();
            if !lower.starts_with("//") && names.iter().any(|name| lower.contains(name)) {
                failures.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
