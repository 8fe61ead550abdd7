use crate::GenerateError;

/// Finds stop strings in text that comes in pieces, and keeps back what could be the beginning of
/// one.
///
/// Text ends before the stop string that is complete first; of those complete at the same byte,
/// before the longest. What is released does not depend on how the text was split: together it is
/// the text before that stop string, or the whole text if there is none.
///
/// ```
/// let mut stops = firesteel_generate::StopStrings::new(&["END".to_owned()])?;
/// assert_eq!(stops.push("one E").text, "one ");
/// assert_eq!(stops.push("NE").text, "EN");
/// let released = stops.push("ND two");
/// assert_eq!((released.text.as_str(), released.stop), ("", Some(0)));
/// # Ok::<(), firesteel_generate::GenerateError>(())
/// ```
#[derive(Debug, Clone)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// Text that could be the beginning of a stop string.
    held: String,
}

/// What [`StopStrings::push`] lets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Released {
    /// Text that is no part of a stop string.
    pub text: String,
    /// Number of the stop string that was found, from 0.
    pub stop: Option<usize>,
}

/// The automaton of Knuth, Morris and Pratt for one stop string.
#[derive(Debug, Clone)]
struct Pattern {
    bytes: Box<[u8]>,
    /// For each length of a matched beginning, less one, the longest shorter one that ends it.
    fallback: Box<[usize]>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut fallback = Vec::with_capacity(bytes.len());
        let mut matched = 0;
        for (index, &byte) in bytes.iter().enumerate() {
            if index > 0 {
                matched = advance(&bytes, &fallback, matched, byte);
            }
            fallback.push(matched);
        }
        Self { bytes, fallback: fallback.into(), matched: 0 }
    }

    /// Takes a byte and says whether it completes the string.
    fn push(&mut self, byte: u8) -> bool {
        self.matched = advance(&self.bytes, &self.fallback, self.matched, byte);
        self.matched == self.bytes.len()
    }
}

fn advance(bytes: &[u8], fallback: &[usize], mut matched: usize, byte: u8) -> usize {
    loop {
        if bytes.get(matched) == Some(&byte) {
            return matched + 1;
        }
        if matched == 0 {
            return 0;
        }
        matched = fallback.get(matched - 1).copied().unwrap_or(0);
    }
}

impl StopStrings {
    /// Stops at any of `strings`, of which there may be none.
    ///
    /// # Errors
    /// When one is empty.
    pub fn new(strings: &[String]) -> Result<Self, GenerateError> {
        if let Some(index) = strings.iter().position(String::is_empty) {
            let value = format!("empty at number {index}");
            let accepted = "at least one character is needed";
            return Err(GenerateError::option("a stop string", value, accepted));
        }
        let patterns = strings.iter().map(|text| Pattern::new(text)).collect();
        Ok(Self { patterns, held: String::new() })
    }

    /// Takes text and releases what cannot belong to a stop string. When one is found, it and what
    /// follows are dropped, and the search starts anew.
    pub fn push(&mut self, text: &str) -> Released {
        let before = self.held.len();
        self.held.push_str(text);
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for (number, pattern) in self.patterns.iter_mut().enumerate() {
                let length = pattern.bytes.len();
                if pattern.push(byte) && found.is_none_or(|(_, longest)| length > longest) {
                    found = Some((number, length));
                }
            }
            if let Some((number, length)) = found {
                let mut text = self.finish();
                text.truncate((before + index + 1).saturating_sub(length));
                return Released { text, stop: Some(number) };
            }
        }
        let kept = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len().saturating_sub(kept));
        Released { text: std::mem::replace(&mut self.held, rest), stop: None }
    }

    /// Releases what was kept back, as the text is over. The search starts anew.
    pub fn finish(&mut self) -> String {
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stops(strings: &[&str]) -> StopStrings {
        StopStrings::new(&strings.iter().map(|&text| text.to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn beginnings_are_kept_back_and_stop_strings_are_not_shown() {
        // (stop strings, pieces, released after each piece, stop, released at the end)
        type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], Option<usize>, &'a str);
        let cases: [Case<'_>; 9] = [
            (&[], &["a", "b"], &["a", "b"], None, ""),
            (&["stop"], &["s", "t", "art"], &["", "", "start"], None, ""),
            (&["stop"], &["it sto", "p it"], &["it ", ""], Some(0), ""),
            (&["stop"], &["it sto"], &["it "], None, "sto"),
            (&["aab"], &["aaa", "ab"], &["a", "a"], Some(0), ""),
            // Complete first counts, not begun first.
            (&["abcd", "bc"], &["abcd"], &["a"], Some(1), ""),
            // Of two complete at once the longer.
            (&["c", "abc"], &["xabc"], &["x"], Some(1), ""),
            (&["é🙂"], &["né", "é", "🙂"], &["n", "é", ""], Some(0), ""),
            (&["🙂"], &["🙁🙂"], &["🙁"], Some(0), ""),
        ];
        for (strings, pieces, released, stop, rest) in cases {
            let mut stops = stops(strings);
            let results: Vec<Released> = pieces.iter().map(|piece| stops.push(piece)).collect();
            let texts: Vec<&str> = results.iter().map(|result| result.text.as_str()).collect();
            assert_eq!(texts, released, "{strings:?} {pieces:?}");
            assert_eq!(results.last().unwrap().stop, stop, "{strings:?} {pieces:?}");
            assert_eq!(stops.finish(), rest, "{strings:?} {pieces:?}");
        }
        let error = StopStrings::new(&["a".into(), String::new()]).unwrap_err().to_string();
        assert_eq!(
            error,
            "a stop string is empty at number 1, but at least one character is needed"
        );
    }

    /// The text before the stop string that ends first, and its number.
    fn searched(text: &str, strings: &[String]) -> (String, Option<usize>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let mut ending: Vec<usize> =
                (0..strings.len()).filter(|&n| text[..end].ends_with(&strings[n])).collect();
            ending.sort_by_key(|&n| std::cmp::Reverse(strings[n].len()));
            if let Some(&number) = ending.first() {
                return (text[..end - strings[number].len()].to_owned(), Some(number));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn any_split_shows_what_searching_the_whole_text_shows(
            text in "[abé🙂]{0,40}",
            strings in proptest::collection::vec("[abé🙂]{1,5}", 0..4),
            cuts in proptest::collection::vec(any::<bool>(), 40),
        ) {
            let (expected, number) = searched(&text, &strings);
            let mut stops = StopStrings::new(&strings).unwrap();
            let (mut shown, mut found) = (String::new(), None);
            let mut piece = String::new();
            for (character, &cut) in text.chars().zip(&cuts) {
                piece.push(character);
                if cut {
                    let released = stops.push(&std::mem::take(&mut piece));
                    shown += &released.text;
                    // No beginning of a stop string is ever shown.
                    prop_assert!(expected.starts_with(&shown));
                    found = released.stop;
                    if found.is_some() {
                        break;
                    }
                }
            }
            if found.is_none() {
                let released = stops.push(&piece);
                shown += &released.text;
                found = released.stop;
            }
            if found.is_none() {
                shown += &stops.finish();
            }
            prop_assert_eq!((shown, found), (expected, number));
        }
    }
}
