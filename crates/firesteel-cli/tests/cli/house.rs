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

fn headings() -> Vec<String> {
    let text = std::fs::read_to_string(Path::new(ROOT).join("ARCHITECTURE.md")).unwrap();
    text.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect()
}

#[test]
fn every_crate_has_its_heading_and_no_other_is_there() {
    let mut headings = headings();
    headings.sort();
    assert_eq!(headings, crates());
}

#[test]
fn crates_depend_only_on_crates_above_them() {
    let order = headings();
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
