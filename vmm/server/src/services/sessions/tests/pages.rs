//! Lists of sessions.

use super::*;

#[tokio::test(start_paused = true)]
async fn sessions_are_listed_in_the_order_they_were_opened_a_page_at_a_time() {
    let (sessions, _) = new();
    let mut clients = Vec::new();
    for owner in ["b", "a", "b"] {
        clients.push(Client::open(&sessions, wants(owner, 0)).await.unwrap());
    }
    let ids: Vec<_> = clients.iter().map(|client| client.id.clone()).collect();
    let page = |owner: &str, page_token: String| {
        let request = ListSessionsRequest {
            page_size: 1,
            page_token,
            owner: owner.to_owned(),
        };
        let page = list(&sessions, request).unwrap();
        for session in &page.sessions {
            assert!(opened_just_now(session, page.anchor), "{page:?}");
        }
        let listed: Vec<_> = page.sessions.into_iter().map(|it| it.id).collect();
        (listed, page.next_page_token)
    };
    let pages = |owner: &str| {
        let (mut pages, mut token) = (Vec::new(), String::new());
        loop {
            let (listed, next) = page(owner, token);
            pages.push(listed);
            if next.is_empty() {
                return pages;
            }
            assert!(pages.len() < 10, "the pages do not end: {pages:?}");
            token = next;
        }
    };
    let of = |ids: &[&String]| ids.iter().map(|id| vec![(*id).clone()]).collect::<Vec<_>>();
    assert_eq!(pages(""), of(&[&ids[0], &ids[1], &ids[2]]));
    assert_eq!(pages("b"), of(&[&ids[0], &ids[2]]));
    assert_eq!(pages("nobody"), [Vec::<String>::new()]);
    let whole = list(&sessions, ListSessionsRequest::default()).unwrap();
    assert_eq!((whole.sessions.len(), &*whole.next_page_token), (3, ""));

    // The last session of a page may be gone when the next page is requested.
    let (listed, token) = page("", String::new());
    assert_eq!(listed, ids[..1]);
    clients.remove(0).close().await;
    assert_eq!(page("", token).0, ids[1..2]);
    for page_token in ["x", "-1", " 1"] {
        let request = ListSessionsRequest {
            page_token: page_token.to_owned(),
            ..Default::default()
        };
        let error = list(&sessions, request).unwrap_err();
        assert_eq!(kind(&error), ErrorKind::BadPage, "{page_token}");
    }
}
