//! The project's own rules.

use crate::support::ROOT;
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
