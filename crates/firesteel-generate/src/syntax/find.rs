/// Finds a text in one that grows. It remembers how far it has looked, so that questions from
/// places that do not go back, and the same question again, look at each byte once.
pub(super) struct Finder {
    needle: &'static str,
    /// Nothing is found from here…
    from: usize,
    /// …to here, which is a boundary of a character.
    searched: usize,
    found: bool,
}

impl Finder {
    pub(super) fn new(needle: &'static str) -> Self {
        Self { needle, from: 0, searched: 0, found: false }
    }

    /// The first place from `from`, a boundary of a character, on.
    pub(super) fn find(&mut self, text: &str, from: usize) -> Option<usize> {
        if from < self.from || from > self.searched {
            *self = Self { from, searched: from, ..Self::new(self.needle) };
        }
        if !self.found {
            let rest = text.get(self.searched..)?;
            match rest.find(self.needle) {
                Some(at) => {
                    self.searched += at;
                    self.found = true;
                }
                None => {
                    // The last bytes may be the beginning of one.
                    let sure = (text.len() + 1).saturating_sub(self.needle.len());
                    self.searched = text.floor_char_boundary(sure).max(self.searched);
                }
            }
        }
        self.found.then_some(self.searched)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_places_are_found_as_the_text_grows() {
        let whole = "é</a></a>x</a></a</a>é</a>";
        let mut finder = Finder::new("</a>");
        for end in (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)) {
            let text = &whole[..end];
            for from in (0..=end).filter(|from| whole.is_char_boundary(*from)) {
                let expected = text[from..].find("</a>").map(|at| from + at);
                assert_eq!(finder.find(text, from), expected, "{text} from {from}");
            }
        }
    }
}
