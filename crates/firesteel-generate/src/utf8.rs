/// Turns a stream of bytes into text, never emitting a part of a character.
///
/// Bytes that begin a character wait for the rest of it, three at most. Bytes that cannot be part
/// of valid UTF-8 become U+FFFD, one for each longest invalid run, so that for any split of the
/// input the pieces together equal [`String::from_utf8_lossy`] of the whole.
///
/// ```
/// let mut stream = firesteel_generate::Utf8Stream::default();
/// let bytes = "🙂".as_bytes();
/// assert_eq!(stream.push(&bytes[..3]), "");
/// assert_eq!(stream.push(&bytes[3..]), "🙂");
/// assert_eq!(stream.finish(), "");
/// ```
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Takes `bytes` and returns the text that is complete now.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let (mut seen, mut kept) = (0, 0);
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            seen += chunk.valid().len() + invalid.len();
            // Only at the end can the rest of the character still come.
            if seen == self.pending.len()
                && str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none())
            {
                kept = invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.pending.drain(..self.pending.len() - kept);
        text
    }

    /// Ends the stream: U+FFFD if the last character is incomplete, else nothing. The stream is
    /// empty afterwards.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.pending).is_empty() { "" } else { "\u{fffd}" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn streamed(bytes: &[u8], cuts: &[usize]) -> String {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        let mut start = 0;
        for &cut in cuts {
            text += &stream.push(&bytes[start..cut]);
            assert!(stream.pending.len() <= 3);
            start = cut;
        }
        text += &stream.push(&bytes[start..]);
        text + stream.finish()
    }

    fn sorted_cuts(bytes: &[u8], seeds: &[usize]) -> Vec<usize> {
        let mut cuts: Vec<usize> = seeds.iter().map(|seed| seed % (bytes.len() + 1)).collect();
        cuts.sort_unstable();
        cuts
    }

    /// Bytes that are likely to sit at the edges of the UTF-8 grammar.
    fn edgy_bytes() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            Just(b'a'),
            proptest::sample::select(vec![0x80u8, 0x8f, 0x90, 0x9f, 0xa0, 0xbf]),
            proptest::sample::select(vec![0xc0u8, 0xc2, 0xdf, 0xe0, 0xed, 0xef]),
            proptest::sample::select(vec![0xf0u8, 0xf4, 0xf5, 0xff]),
            any::<u8>(),
        ];
        proptest::collection::vec(byte, 0..40)
    }

    proptest! {
        #[test]
        fn any_split_of_any_bytes_gives_the_lossy_text(
            bytes in edgy_bytes(),
            seeds in proptest::collection::vec(any::<usize>(), 0..8),
        ) {
            let cuts = sorted_cuts(&bytes, &seeds);
            prop_assert_eq!(streamed(&bytes, &cuts), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn any_split_of_valid_text_gives_the_text(
            text in any::<String>(),
            seeds in proptest::collection::vec(any::<usize>(), 0..8),
        ) {
            let cuts = sorted_cuts(text.as_bytes(), &seeds);
            prop_assert_eq!(streamed(text.as_bytes(), &cuts), text);
        }
    }

    #[test]
    fn every_single_byte_split_of_mixed_text() {
        let bytes = "a🙂é\u{10ffff}".as_bytes();
        let all: Vec<usize> = (0..bytes.len()).collect();
        assert_eq!(streamed(bytes, &all), "a🙂é\u{10ffff}");
        assert_eq!(streamed(&bytes[..4], &all[..4]), "a\u{fffd}");
    }

    #[test]
    fn a_finished_stream_starts_anew() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(&[0xf0, 0x9f]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
        assert_eq!(stream.push(b"ok"), "ok");
    }
}
